"""What the four command lines share: the error edge, and commands that are loaded when they are used."""
