"""Prompts made of the ids that were sampled: which calls can have one, and how it is made."""
