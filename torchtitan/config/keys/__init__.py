"""The sections of the configuration: each key with its type, default and help text."""
