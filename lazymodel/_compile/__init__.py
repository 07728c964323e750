"""Functions that will be called with a model: lowered before it exists, and compiled while its weights are read."""
