"""What one asks before machines are paid: which layout is fastest, what fits, what a network does to it."""
