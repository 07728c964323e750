"""GGUF files as presets: what is in one, as KerasHub's own Hugging Face converters ask for it."""
