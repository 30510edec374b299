"""`bench demo`: captured calls, then rollouts of a small real model."""
