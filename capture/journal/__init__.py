"""The append-only journal of calls, its files and their layout in a job folder, and what is redacted."""
