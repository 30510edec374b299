"""Job folders read as rollouts, once or while they grow."""
