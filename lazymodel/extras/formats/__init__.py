"""Formats of checkpoints other than safetensors, one module each; the core opens them by its table of formats."""
