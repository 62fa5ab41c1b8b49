"""The server that sites call: it admits them, merges their fragments, and serves the anchor."""
