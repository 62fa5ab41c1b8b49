"""Checks between nodes before a run: every node's part, and node 0's."""
