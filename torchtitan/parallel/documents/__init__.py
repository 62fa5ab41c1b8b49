"""Attention that keeps the documents of a packed sequence apart."""
