"""What the core never imports: each extra is loaded at first use, and imports no other."""
