"""Training on pairs, of which one conversation is preferred to the other (DPO), beside the model that it began with."""
