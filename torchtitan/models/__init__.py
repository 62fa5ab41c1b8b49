"""Shapes, parts and refusals of any model without torch, the table of families, and one folder for each family."""
