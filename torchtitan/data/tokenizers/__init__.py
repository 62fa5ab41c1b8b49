"""All kinds of tokenizer behind one interface."""
