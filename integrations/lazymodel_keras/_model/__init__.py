"""Turns a recorded Keras object into an abstract model, and back."""
