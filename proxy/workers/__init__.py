"""Several proxy processes behind one address."""
