"""What runs on a machine that others reach by ssh: it starts, watches and stops runs. No torch."""
