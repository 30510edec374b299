"""The APIs that agents speak besides chat completions: one folder per dialect, registered in `registry`."""
