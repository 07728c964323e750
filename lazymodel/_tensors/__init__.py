"""Arrays that were not read yet: where their bytes lie, views of them, and how boxes of them are filled."""
