"""Files that lie in object stores and on web servers: where they are, asking for ranges of them, reading ahead."""
