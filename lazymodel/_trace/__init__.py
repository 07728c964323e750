"""A function becomes init recipes."""
