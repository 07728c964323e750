"""GGUF files as presets: their content in the form that KerasHub's own Hugging Face converters request."""
