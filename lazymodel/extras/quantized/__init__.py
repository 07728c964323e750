"""Quantized checkpoints of Hugging Face: the meaning of each tensor, and its decoding. One module per family."""
