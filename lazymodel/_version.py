"""The version, in the one place that the build, `lazymodel --version` and `lazymodel.__version__` take it from."""

VERSION = "0.1.0"
