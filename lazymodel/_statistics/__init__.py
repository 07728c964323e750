"""Numbers about values."""
