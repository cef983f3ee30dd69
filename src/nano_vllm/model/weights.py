"""Open a model by path: canonical names to tensors, each read when asked for."""
