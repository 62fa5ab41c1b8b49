"""What is tried on a module's first samples before it trains, so that mistakes show at once."""
