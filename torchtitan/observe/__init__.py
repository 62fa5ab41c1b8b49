"""What a run records: numbers, log, traces, its folder, failures."""
