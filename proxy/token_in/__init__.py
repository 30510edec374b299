"""Token-in: prompts made of sampled ids. Which calls can have one, and how it is made."""
