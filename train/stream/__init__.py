"""Rollout records as a stream, in groups with advantages."""
