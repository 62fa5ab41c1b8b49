"""Documents become streams, streams become global batches, and each rank takes its slice."""
