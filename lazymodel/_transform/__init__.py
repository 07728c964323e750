"""An abstract model becomes another: the verbs `with_optimizer`, `quantize`, `lora`, `reinitialize`, `rekey`."""
