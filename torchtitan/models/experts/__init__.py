"""A decoder whose feed-forward networks are mixtures of experts: what differs from the plain decoder."""
