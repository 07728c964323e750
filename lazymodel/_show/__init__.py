"""What people read: text, tables, progress. It knows no model."""
