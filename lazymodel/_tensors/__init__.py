"""Arrays that are not read yet: where their bytes are stored, views of them, and how regions of them are filled."""
