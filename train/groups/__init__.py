"""Groups of rollouts for GRPO-style training: one computation for the stream, for rows and for the view."""
