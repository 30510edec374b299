"""Request heads that RFC 9110 and RFC 9112 have refused, each with its status, on the wire."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.http.client_request import ClientRequest
from proxy.http.connection import Connection
from proxy.http.limits import Limits
from tests.proxy.http.test_connection import Wire
from tests.proxy.raw import statuses


async def answer(request: ClientRequest) -> None:
    status = int(request.target.rpartition(b"=")[2]) if b"=" in request.target else 200
    if b"stream" in request.target:
        request.start(status, [(b"x-a", b"b")])
        request.push(b"piece")
        request.end(b"end")
    else:
        request.answer(status, [], b"whole")


async def reply(data: bytes) -> tuple[bytes, bool]:
    """What is written in reply to `data`, and whether the connection is closed then."""
    wire, tasks = Wire(), set[asyncio.Task[None]]()
    connection = Connection(answer, set(), tasks, Limits())
    connection.connection_made(wire)
    connection.data_received(data)
    for _ in range(20):  # more turns of the loop than an answer takes
        await asyncio.sleep(0)
    connection.connection_lost(None)
    return wire.written, wire.closed


def head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1")


GET, POST = "GET / HTTP/1.1", "POST / HTTP/1.1"
REFUSED: list[tuple[int, bytes]] = [
    # RFC 9112, 3.2: one Host, and a valid one
    (400, head(GET)), (400, head(GET, "host: a", "host: a")), (400, head(GET, "host: a", "Host: b")),
    (400, head(GET, "host: a b")), (400, head(GET, "host: a/b")), (400, head(GET, "host: user@a")),
    (400, head(GET, "host: a,b:x")), (400, head(GET, "host: a:b")), (400, head(GET, "host: http://a")),
    (400, head(GET, "host: [::1")), (400, head(GET, "host: a\\b")), (400, head(GET, "host: caf\xe9")),
    (400, head("GET http://a/ HTTP/1.1")), (400, head("GET / HTTP/1.0", "host: a", "host: b")),
    # RFC 9110, 15.6.6: the version
    (505, head("GET / HTTP/2.0", "host: a")), (505, head("POST / HTTP/2.0", "host: a")),
    (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), (505, head("GET / HTTP/3.0", "host: a")),
    (505, head("GET / HTTP/1.2", "host: a")), (505, head("GET / HTTP/0.9", "host: a")), (505, b"GET /\r\n\r\n"),
    # RFC 9112, 6.1: transfer codings
    (501, head(POST, "host: a", "transfer-encoding: gzip, chunked")),
    (501, head(POST, "host: a", "transfer-encoding: gzip")),
    (501, head(POST, "host: a", "transfer-encoding: xchunked")),
    (501, head(POST, "host: a", "transfer-encoding: identity")),
    (501, head(POST, "host: a", "Transfer-Encoding: deflate", "Transfer-Encoding: chunked")),
    (501, head(POST, "host: a", "transfer-encoding: chunked;q=1")),
    (400, head(POST, "host: a", "transfer-encoding: chunked, gzip")),
    (400, head(POST, "host: a", "transfer-encoding: chunked, chunked")),
    (400, head("POST / HTTP/1.0", "host: a", "transfer-encoding: chunked")),
    # RFC 9110, 9.1: the method
    (501, head("FOO / HTTP/1.1", "host: a")), (501, head("get / HTTP/1.1", "host: a")),
    (501, head("X-PURGE /v1/models HTTP/1.1", "host: a")), (501, head("PROPFOO * HTTP/1.1", "host: a")),
    (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), (400, b"(GET / HTTP/1.1\r\n\r\n"),
    # RFC 9110, 10.1.1: what is expected
    (417, head(POST, "host: a", "expect: 200-ok")), (417, head(POST, "host: a", "expect: 100-continue, x")),
    (417, head(POST, "host: a", "expect: ")),
    # RFC 9112, 2.2 and 5: line ends and names
    (400, head(GET, "host : a")), (400, head(GET, " host: a")), (400, head(GET, "host: a", ": b")),
    (400, b"GET / HTTP/1.1\nhost: a\n\n"), (400, head("GET  / x HTTP/1.1", "host: a")),
    (400, head(GET, "host: a", "x: a\x00b")), (400, head(GET, "host: a", "x\xff: b")),
]  # fmt: skip


@pytest.mark.parametrize(("status", "data"), REFUSED)
async def test_a_head_that_the_rfcs_refuse_is_refused_with_a_sentence(status: int, data: bytes) -> None:
    written, closed = await reply(data + head(GET, "host: a"))
    assert statuses(written) == [status] and closed
    top, _, body = written.partition(b"\r\n\r\n")
    assert b"connection: close" in top and b"content-type: application/json" in top
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["code"] == status and len(error["message"]) > 20
    assert top.split(b"content-length: ")[1] == str(len(body)).encode()


@pytest.mark.parametrize(
    "data",
    [
        head(GET, "host: a"), head(GET, "Host: a.b:80"), head(GET, "host: [::1]:8100"), head(GET, "host:"),
        head(GET, "host: a_b.svc"), head("GET http://a/ HTTP/1.1", "host: b"), head("GET / HTTP/1.0"),
        head(POST, "host: a", "transfer-encoding: Chunked") + b"0\r\n\r\n",
        head(GET, "host: a", "expect: 100-Continue"),
        head(POST, "host: a", "transfer-encoding: ,chunked") + b"0\r\n\r\n", b"\r\n" + head(GET, "host: a"),
        head("GET / HTTP/1.0", "expect: x"),
    ],
)  # fmt: skip
async def test_a_head_that_is_unusual_and_valid_is_answered(data: bytes) -> None:
    written, _ = await reply(data)
    assert [status for status in statuses(written) if status != 100] == [200]


@pytest.mark.parametrize("status", [204, 304, 200, 205])
@pytest.mark.parametrize("how", ["whole", "stream"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_reply_that_can_have_no_body_has_neither_body_nor_length(status: int, how: str, method: str) -> None:
    """RFC 9110, 8.6 and 9.3.2; RFC 9112, 6.1. What follows must be read as the next reply."""
    written, _ = await reply(head(f"{method} /{how}={status} HTTP/1.1", "host: a") + head(GET, "host: a"))
    first, second = written.split(b"HTTP/1.1 ")[1:]
    top, _, body = first.partition(b"\r\n\r\n")
    assert second.endswith(b"\r\n\r\nwhole")
    if status in (204, 304):
        assert b"content-length" not in top and b"transfer-encoding" not in top
    assert bool(body) == (method == "GET" and status not in (204, 304))
