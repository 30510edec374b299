"""A client that sends bytes no library would, and reads what comes back until it ends or nothing more comes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httptools

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[Pair]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


class Replies:
    """Counts whole replies in what comes back; `open` says whether the connection stays open after them."""

    def __init__(self) -> None:
        self.count = 0
        self.open = True
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        with suppress(httptools.HttpParserError):
            self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self.count += self._parser.get_status_code() >= 200
        self.open = self.open and self._parser.should_keep_alive()


async def until_quiet(
    reader: asyncio.StreamReader, seconds: float = 0.25, bound: float = 10, replies: int | None = None
) -> bytes:
    """Everything that comes until the end, or until `seconds` pass without a byte after the first one, or until
    `replies` are whole and the connection stays open.
    """
    received: list[bytes] = []
    counted = Replies()
    async with asyncio.timeout(bound):
        while not (counted.open and counted.count == replies):
            try:
                async with asyncio.timeout(seconds if received else None):
                    data = await reader.read(1 << 16)
            except TimeoutError:
                break
            if not data:
                break
            received.append(data)
            counted.feed(data)
    return b"".join(received)


async def exchange_to_end(port: int, data: bytes, bound: float = 60) -> bytes:
    """For requests of which the last closes the connection: everything that comes until then."""
    async with connection(port) as (reader, writer), asyncio.timeout(bound):
        writer.write(data)
        return await reader.read()


async def exchange(port: int, data: bytes, replies: int = 1, seconds: float = 0.25) -> bytes:
    """What comes back: `replies` whole ones, all until the end where one closes the connection, else until quiet."""
    async with connection(port) as (reader, writer):
        writer.write(data)
        return await until_quiet(reader, seconds, replies=replies)


def post(body: bytes | dict[str, Any], *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """A POST; `headers` are whole lines. A content-length goes along unless one of them says how long the body is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: proxy", "content-type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"content-length: {len(raw)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + raw


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})\b", data)]
