"""Reads what launchers set, plans this node, and starts its ranks by one torchrun command. No torch."""
