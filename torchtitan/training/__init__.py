"""Assembles a run out of the rooms below it, and takes its steps."""
