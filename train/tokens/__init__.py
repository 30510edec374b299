"""The tokens of a rollout: sequences, coverage, audit."""
