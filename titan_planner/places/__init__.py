"""Layouts for unlike nodes and links: where each rank goes."""
