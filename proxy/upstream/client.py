"""What the proxy knows of a client of an engine: it sends a request, and hands on the answer's bytes as they arrive.

`pool.py` calls engines over plain HTTP; `httpx_client.py` calls hosted APIs over TLS.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from proxy.errors import UpstreamBroke
from proxy.http.headers import Headers

#: An answer read whole is at most this large; a compressed one of a few MiB could otherwise take all memory.
LARGEST = 1 << 30
#: Bytes of an answer's head, interim answers included, and of what stands between two pieces of its body: chunk lengths
#: and extensions, trailers.
LARGEST_HEAD = 256 << 10


class Response(Protocol):
    """An answer whose head has arrived."""

    status: int
    headers: Headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, decompressed, in pieces as they arrive. Raises `UpstreamBroke` or `UpstreamTimeout`."""
        ...

    async def pump(self, take: Callable[[bytes], bool], room: Callable[[], Awaitable[None]]) -> None:
        """`chunks`, each handed to `take` as it arrives; where that says False, `room` is awaited before the next."""
        ...

    def end_within(self, seconds: float) -> None:
        """`pump` waits no longer for what may still come; then it raises `UpstreamTimeout`."""
        ...

    async def read(self) -> bytes:
        """The whole body."""
        ...

    def close(self) -> None:
        """Done with it. Before the end of the body this drops the connection, and the engine stops generating."""
        ...


class Client(Protocol):
    """Sends requests to one upstream."""

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Response: ...
    async def close(self) -> None: ...


async def read_all(response: Response) -> bytes:
    """An answer's whole body. Raises `UpstreamBroke` where it is larger than `LARGEST`."""
    parts: list[bytes] = []
    size = 0
    async for data in response.chunks():
        size += len(data)
        if size > LARGEST:
            raise UpstreamBroke(f"the engine's answer is larger than {LARGEST >> 20} MiB")
        parts.append(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)
