"""Sandboxes: Docker containers, or plain folders without Docker, with their images and network."""
