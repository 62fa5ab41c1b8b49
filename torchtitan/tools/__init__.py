"""What one does around a run, a folder or a file: one module or folder for each verb."""
