"""Gemini's generateContent API as chat completions, and back."""
