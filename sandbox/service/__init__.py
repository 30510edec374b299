"""`bench serve`: rollouts over HTTP, in groups, for trainers on this host or another."""
