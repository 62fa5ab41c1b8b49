"""The keys of a TOML file, how a command line overrides them, and which values cannot be combined. No torch."""
