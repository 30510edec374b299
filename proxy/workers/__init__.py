"""Several proxy processes, each with sessions and a port of its own."""
