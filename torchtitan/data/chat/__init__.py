"""Conversations as training data: rows, the template that makes a text of them, and which tokens are learned."""
