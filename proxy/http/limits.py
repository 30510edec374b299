"""What one client may cost: bounds on the size and time of requests and replies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are bytes, times seconds."""

    #: A request line and headers, or what stands between two bytes of a body: chunk lengths and extensions, trailers.
    head_size: int = 256 << 10
    #: Headers of one request: each costs more memory than its bytes.
    headers: int = 1000
    #: Requests on one connection that wait for their turn: a single read may hold ten thousand.
    pipelined: int = 256
    #: Body bytes that wait to be read before the connection stops reading.
    high_water: int = 64 << 10
    #: From a connection, or from the first byte of a further request on it, to the end of the request's headers.
    head_time: float = 60.0
    #: For a request body of any size: a quarter of a gigabyte at a megabyte per second.
    body_time: float = 300.0
    #: Between two requests on one connection.
    idle_time: float = 75.0
    #: For the rest of a body whose request was answered already.
    linger_time: float = 10.0
    #: For a client that reads nothing of its reply.
    unread_time: float = 300.0
