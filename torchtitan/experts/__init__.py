"""Experts in a run: divided over ranks, kept equally busy, and what the log says of their load."""
