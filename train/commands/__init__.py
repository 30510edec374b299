"""The commands of `bench train`, one file per command."""
