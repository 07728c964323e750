"""Checkpoints of training: callbacks, saving, restoring."""
