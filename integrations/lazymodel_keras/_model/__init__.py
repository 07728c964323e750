"""From a recorded Keras object to an abstract model, and back."""
