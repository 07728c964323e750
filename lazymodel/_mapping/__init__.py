"""The mapping from tensors to variables."""
