"""Tasks, agents, containers, verifiers and jobs: runs a rollout and scores it."""
