"""`bench train run sft`: a Prime-RL run from converted rows."""
