"""Trains two configurations from one seed and compares their losses."""
