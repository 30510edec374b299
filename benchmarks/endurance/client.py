"""The agents' side: a session's calls, one after the other over a kept connection, and what the client saw of each."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.endurance.calls import DIALECTS, Call, sampled_ids, stream_text, word
from benchmarks.endurance.engine import HUGE, Engine

#: Seconds that a client waits for anything at all.
PATIENCE = 90.0


@dataclass(slots=True)
class ClientReport:
    """What the client of a call saw of it; `client` is one of `Seen.client`. `wrong` says what was wrong.

    `finished`: the client received the end of a good reply, whatever happened to the connection after that.
    """

    call: Call
    client: str = "nothing"
    status: int = 0
    finished: bool = False
    wrong: str | None = None


class Agent:
    """One client with a key; it keeps its connection as an agent's library does."""

    def __init__(self, port: int, key: str, engine: Engine, prefix: str = "") -> None:
        """`engine` is looked at only to leave when it has the call; `prefix` stands before a dialect's path."""
        self.port = port
        self.key = key
        self.engine = engine
        self.prefix = prefix
        self._pair: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def make(self, call: Call) -> ClientReport:
        report = ClientReport(call)
        try:
            async with asyncio.timeout(PATIENCE):
                await self._exchange(call, report)
        except (ConnectionError, asyncio.IncompleteReadError):
            report.client = "cut"
            self.hang_up()
        except TimeoutError:
            report.wrong = f"nothing came for {PATIENCE:g} s"
            self.hang_up()
        return report

    def hang_up(self, *, reset: bool = False) -> None:
        if self._pair is None:
            return
        writer = self._pair[1]
        if reset and (sock := writer.get_extra_info("socket")) is not None:
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort() if reset else writer.close()
        self._pair = None

    async def _exchange(self, call: Call, report: ClientReport) -> None:
        dialect = DIALECTS[call.dialect]
        body = json.dumps(dialect.ask(call)).encode()
        head = f"POST {self.prefix}{dialect.path} HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\n"
        head += f"{dialect.key_header} {self.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        if self._pair is None:
            self._pair = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
        reader, writer = self._pair
        if call.kind == "unsent":
            writer.write(head.encode() + body[: len(body) // 2])
            await writer.drain()
            await asyncio.sleep(0.02)
            report.client = "unsent"
            self.hang_up()
            return
        writer.write(head.encode() + body)
        if call.kind == "leaves" and not call.streams:
            while call.name not in self.engine.ledger:  # noqa: ASYNC110 (the ledger cannot notify)
                await asyncio.sleep(0.02)
            report.client = "left"
            self.hang_up(reset=_tails(call))
            return
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        report.status = int(lines[0].split(" ")[1])
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        if "transfer-encoding" in headers:
            await self._stream(call, report, reader)
        else:
            data = await reader.readexactly(int(headers["content-length"]))
            self._whole(call, report, data)
        if headers.get("connection") == "close":
            self.hang_up()

    async def _stream(self, call: Call, report: ClientReport, reader: asyncio.StreamReader) -> None:
        dialect = DIALECTS[call.dialect]
        data = bytearray()
        leave_at = call.kind == "leaves" and word(sampled_ids(call.name, call.tokens)[max(1, call.tokens // 2) - 1])
        while size := int(await reader.readuntil(b"\r\n"), 16):
            data += (await reader.readexactly(size + 2))[:-2]
            report.finished = report.finished or dialect.end in data[-size - len(dialect.end) :]
            if leave_at and f'"{leave_at}"'.encode() in data:
                report.client = "left"
                self.hang_up(reset=_tails(call))
                return
        await reader.readexactly(2)
        text, failed = stream_text(dialect, bytes(data))
        report.client = "failed" if failed else "answered"
        if not failed and not report.finished:
            report.wrong = "the stream ended well without its end"
        if not failed and text != _expected(call):
            report.wrong = f"the text is not what was sampled: {text[:80]!r}"

    def _whole(self, call: Call, report: ClientReport, data: bytes) -> None:
        try:
            body = json.loads(data)
        except ValueError:
            report.wrong = f"status {report.status} with what is no JSON: {data[:80]!r}"
            return
        report.client = "answered" if report.status == 200 else "status"
        report.finished = report.status == 200
        if report.status == 200 and DIALECTS[call.dialect].whole_text(body) != _expected(call):
            report.wrong = f"the text is not what was sampled: {data[:200]!r}"
        elif report.status != 200 and not body["error"]["message"]:
            report.wrong = "an error without a sentence"


def _expected(call: Call) -> str:
    words = [word(token_id) for token_id in sampled_ids(call.name, call.tokens)]
    if call.kind == "huge":
        words[call.tokens // 2] = "x" * HUGE
    return "".join(words)


def _tails(call: Call) -> bool:
    """Half of the clients that leave reset their connection, half close it."""
    return random.Random(call.name).random() < 0.5
