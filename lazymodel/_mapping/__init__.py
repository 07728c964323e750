"""Which tensor becomes which variable."""
