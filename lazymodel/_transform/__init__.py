"""Turns an abstract model into another: `with_optimizer`, `quantize`, `lora`, `reinitialize`, `rekey`."""
