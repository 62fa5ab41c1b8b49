"""Tokens that `prepare` made once, and that training maps into memory."""
