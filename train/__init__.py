"""From logs to trainers: coverage, streams, groups with advantages, and rows. Reads files; needs no network."""
