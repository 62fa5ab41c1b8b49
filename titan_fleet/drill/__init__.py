"""Breaks a run in many ways, and demands that it ends as if nothing had happened."""
