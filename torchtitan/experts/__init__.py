"""Experts in a run: divided over ranks, kept equally busy, updated by Muon, and what the log says of their load."""
