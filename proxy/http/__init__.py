"""The HTTP side that agents talk to: listener, connection, request, headers."""
