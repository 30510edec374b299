"""A client that sends bytes no library would, and reads what comes back until it ends or nothing more comes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[Pair]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def until_quiet(reader: asyncio.StreamReader, seconds: float = 0.25, bound: float = 10) -> bytes:
    """Everything that comes until the end, or until `seconds` pass without a byte after the first one."""
    got: list[bytes] = []
    async with asyncio.timeout(bound):
        while True:
            try:
                async with asyncio.timeout(seconds if got else None):
                    data = await reader.read(1 << 16)
            except TimeoutError:
                break
            if not data:
                break
            got.append(data)
    return b"".join(got)


async def exchange_to_end(port: int, data: bytes, bound: float = 60) -> bytes:
    """For requests of which the last closes the connection: everything that comes until then."""
    async with connection(port) as (reader, writer), asyncio.timeout(bound):
        writer.write(data)
        return await reader.read()


async def exchange(port: int, data: bytes, seconds: float = 0.25) -> bytes:
    async with connection(port) as (reader, writer):
        writer.write(data)
        return await until_quiet(reader, seconds)


def post(body: bytes | dict[str, Any], *headers: str, path: str = "/v1/chat/completions") -> bytes:
    """A POST; `headers` are whole lines. A content-length goes along unless one of them says how long the body is."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: proxy", "content-type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"content-length: {len(raw)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + raw


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})\b", data)]
