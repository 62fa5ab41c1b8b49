"""Generates text, evaluates weights, trains a tokenizer."""
