"""Checkpoints looked into: what they hold, what is wrong with them, whether they have the hashes that are stated."""
