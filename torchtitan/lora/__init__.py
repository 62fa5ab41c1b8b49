"""Training a part of a model: adapters beside frozen weights (LoRA, arXiv:2106.09685), or some weights alone."""
