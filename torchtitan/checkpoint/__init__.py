"""Where checkpoints are stored, and how they are saved, found, verified, loaded and kept."""
