"""Output for people: text, tables, progress. It depends on no model."""
