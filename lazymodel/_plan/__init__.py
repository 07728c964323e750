"""What it will take, before a byte moves: the verb `plan`."""
