"""A WireGuard network between nodes behind routers: direct where a way opens, relayed otherwise. No torch."""
