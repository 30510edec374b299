"""A connection's parser continues from answer to answer: each is read as if it were alone, and none after a bad one."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from proxy.errors import UpstreamBroke
from proxy.settings import Timeouts
from proxy.upstream.connection import Connection
from proxy.upstream.gate import Gate

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n3\r\nxyz\r\n0\r\n"
SIZED = OK + b"content-length: 3\r\nx: 1\r\n\r\nabc"
#: Whole answers after which the connection is kept: status and body.
GOOD = {
    SIZED: (200, b"abc"),
    CHUNKED + b"\r\n": (200, b"xyz"),
    CHUNKED + b"x-sum: 9\r\nserver-timing: a\r\n\r\n": (200, b"xyz"),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + SIZED: (200, b"abc"),
    b"HTTP/1.1 204 No Content\r\n\r\n": (204, b""),
    b"HTTP/1.1 304 Not Modified\r\ncontent-length: 10\r\n\r\n": (304, b""),
    OK + b"content-length: 0\r\n\r\n": (200, b""),
}
#: Whole answers after which it is not.
LAST = [
    OK + b"content-length: 3\r\nconnection: close\r\n\r\nabc",
    b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc",
    SIZED + b"H",
    SIZED + b"HTTP/1.1 100 Continue\r\n\r\n",
    SIZED + SIZED,
    CHUNKED + b"\r\nHTTP/1.1 2",
    SIZED + b"\0",
]
BROKEN = [
    OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    OK + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    b"SSH-2.0-OpenSSH\r\n",
]


class Wire:
    """A transport that goes nowhere: stands for asyncio's, of which the engine tests use the real one."""

    closed = False

    def writelines(self, data: list[bytes]) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Pool:
    kept = 0
    gate = Gate()

    def release(self, connection: Connection) -> None:
        self.kept += 1

    def forget(self, connection: Connection) -> None:
        pass


def connected() -> tuple[Connection, Pool]:
    pool = Pool()
    connection = Connection(pool)
    connection.connection_made(cast(asyncio.Transport, Wire()))
    return connection, pool


async def answered(connection: Connection, data: bytes, chance: random.Random) -> tuple[Any, ...]:
    """What is heard of an answer that comes in pieces."""
    asked = asyncio.ensure_future(connection.exchange([b"GET"], Timeouts(1, 1, 1)))
    await asyncio.sleep(0)
    cuts = sorted(chance.sample(range(1, len(data)), chance.choice([0, 1, 5, len(data) - 1])))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        connection.data_received(data[start:end])
        if chance.random() < 0.2:
            await asyncio.sleep(0)
    try:
        await asked
        return connection.status, b"".join([piece async for piece in connection.chunks()])
    finally:
        connection.close()


async def test_answers_one_after_the_other_are_read_as_each_alone() -> None:
    chance = random.Random(1)
    for _ in range(60):
        connection, pool = connected()
        for count in range(1, 9):
            data = chance.choice(list(GOOD))
            assert await answered(connection, data, chance) == GOOD[data]
            assert (b"x", b"1") in connection.headers or b"x: 1" not in data
            assert pool.kept == count and connection.usable


@pytest.mark.parametrize("data", LAST)
async def test_nothing_is_asked_on_a_connection_after_an_answer_that_ends_it(data: bytes) -> None:
    connection, _ = connected()
    assert await answered(connection, SIZED, random.Random(0)) == (200, b"abc")
    assert (await answered(connection, data, random.Random(0)))[0] == 200
    assert not connection.usable


@pytest.mark.parametrize("data", BROKEN)
@pytest.mark.parametrize("before", [0, 2])
async def test_nothing_is_asked_on_a_connection_after_a_broken_answer(data: bytes, before: int) -> None:
    connection, pool = connected()
    for _ in range(before):
        await answered(connection, SIZED, random.Random(0))
    with pytest.raises(UpstreamBroke):
        await answered(connection, data, random.Random(0))
    assert pool.kept == before and not connection.usable
