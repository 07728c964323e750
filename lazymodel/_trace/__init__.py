"""Turns a function into init recipes."""
