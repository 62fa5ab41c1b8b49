"""The Qwen3 family with experts."""
