"""Puts values onto devices: the method `materialize`, the stream, the report."""
