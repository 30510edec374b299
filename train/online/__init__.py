"""Trainers that sample while they train: a client of the rollout service, and what each trainer loads."""
