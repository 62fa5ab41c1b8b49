"""Several sites train one model and merge it in fragments. A run without [swarm] loads only the keys."""
