"""Decides who may ask the console for what."""
