"""The families Llama 2 and 3."""
