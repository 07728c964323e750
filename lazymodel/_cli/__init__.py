"""The command `lazymodel`."""
