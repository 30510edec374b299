"""Which call a prompt continues, and the ids that a prompt made of sampled ids consists of. Pure rules."""
