"""Searches the layouts of like machines, and predicts their time, memory and traffic."""
