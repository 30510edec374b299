"""Anthropic's Messages API as chat completions, and back."""
