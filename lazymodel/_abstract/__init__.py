"""The model as data: variables, their paths and placement, and the adapters of frameworks."""
