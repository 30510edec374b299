"""One engine answer read piece by piece: choices with their ids and logprobs, and whether they are complete."""
