"""Where the run starts, what it saves, and which checkpoint is the best."""
