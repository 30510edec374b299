"""The interface of an engine's clients: they send a request, and pass on the answer's bytes as they arrive.

`pool.py` calls engines over plain HTTP; `httpx_client.py` calls hosted APIs over TLS.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from proxy.errors import UpstreamBroke
from proxy.http.headers import Headers
from proxy.settings import AnswerLimits

#: Bytes of an answer that is read whole, unless its reader says otherwise.
LARGEST = AnswerLimits().size
#: Bytes of an answer's head, interim answers included, and of what lies between two pieces of its body: chunk lengths
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
        """`chunks`, each handed to `take` as it arrives; where that is False, `room` is awaited before the next."""
        ...

    def end_within(self, seconds: float) -> None:
        """After `seconds` `pump` stops waiting for the rest of the body and raises `UpstreamTimeout`."""
        ...

    async def read(self, largest: int = LARGEST) -> bytes:
        """The whole body. Raises `UpstreamBroke` where it has more than `largest` bytes."""
        ...

    def close(self) -> None:
        """Before the end of the body this drops the connection, and the engine stops generating."""
        ...


class Client(Protocol):
    """Sends requests to one upstream."""

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> Response: ...
    async def close(self) -> None: ...


async def read_all(response: Response, largest: int) -> bytes:
    """An answer's whole body. Raises `UpstreamBroke` where it has more than `largest` bytes."""
    parts: list[bytes] = []
    size = 0
    async for data in response.chunks():
        size += len(data)
        if size > largest:
            raise UpstreamBroke(f"the engine's answer is larger than {largest >> 20} MiB")
        parts.append(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)
