"""Values onto devices: the verb `materialize`, the stream, the report."""
