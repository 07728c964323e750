"""What will be called with a model: lowered before it is there, and compiled while its weights are read."""
