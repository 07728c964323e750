"""Shardings that are proposed for a model that has none: `lm.auto`."""
