"""Rollouts and jobs: prepare, act, verify, write."""
