"""What agents speak besides chat completions: one file a dialect, to chat and back, streamed and not."""
