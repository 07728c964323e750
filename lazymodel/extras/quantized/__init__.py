"""Quantized checkpoints of Hugging Face: the meaning of each tensor, and its decoding. `methods.py` has the table of
methods, where a new one begins."""
