"""Tables of weights that are proposed, or taken from converters."""
