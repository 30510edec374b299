"""OpenAI's Responses API as chat completions, and back."""
