"""Task folders: read, checked, made from a template."""
