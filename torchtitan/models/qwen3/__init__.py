"""The family Qwen3."""
