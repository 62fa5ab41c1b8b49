"""Downloads, converts, exports and pushes weights and tokenizers."""
