"""The decoder that all families are: its shape, network, tensor-parallel plan, and names in published files."""
