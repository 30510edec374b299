"""Rollouts converted to rows that trainers load."""
