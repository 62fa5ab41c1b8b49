"""Runs verbs for the console, in processes of their own."""
