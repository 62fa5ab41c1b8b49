"""Many machines and people: starting runs by ssh or a scheduler, watching them, and training across sites."""
