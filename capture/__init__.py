"""What was sampled: protocol, records and journals. Pure but for the journal's file: no network, no Docker, no CLI."""
