"""`bench doctor`."""


def doctor_command() -> None:
    """Check this machine."""
