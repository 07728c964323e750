"""Steps that change the layers of a recorded model."""
