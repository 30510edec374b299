"""Small statistics."""


def median(values):
    """The middle value."""
    if not values:
        raise ValueError("no values")
    values.sort()
    return values[len(values) // 2]
