"""Quantized checkpoints as Hugging Face has them: what each tensor is, and its decoding, a family a module."""
