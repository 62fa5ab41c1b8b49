"""A page and its API that show, start, compare and stop runs on machines. No torch."""
