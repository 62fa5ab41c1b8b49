"""A pipeline's schedule as actions on a timeline."""
