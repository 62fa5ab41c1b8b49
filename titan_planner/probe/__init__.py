"""Measures the devices and links of machines that are there."""
