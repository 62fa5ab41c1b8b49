"""Runs that others measured and published, as rows to fit and to predict."""
