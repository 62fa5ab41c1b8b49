"""Named tensors, read one at a time from checkpoints, Hugging Face folders and publishers' own files."""
