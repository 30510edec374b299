"""Sessions: keys, journals, and what a session remembers of its calls."""
