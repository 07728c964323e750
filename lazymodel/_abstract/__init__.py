"""The model as data: variables, their paths, who holds them, and the adapters of frameworks."""
