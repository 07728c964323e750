"""The version, the single source for the build, `lazymodel --version` and `lazymodel.__version__`."""

VERSION = "0.1.0.dev0"
