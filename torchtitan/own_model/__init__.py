"""A module that a user brings: its data, what is derived from it, its build and step. A plain run loads none of it."""
