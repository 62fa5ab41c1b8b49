"""The watch over other ranks. A run of one process does not load it."""
