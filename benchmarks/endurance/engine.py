"""An engine that keeps a ledger and misbehaves as calls ask: vLLM 0.32's answers, and all that ends them early.

A double of an engine's HTTP side; the real engines are in `tests/proxy/test_real_engine.py` and `tests/live`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from benchmarks.endurance.calls import KINDS, logprob, named, prompt_ids, sampled_ids, word

#: Seconds after which the engine gives up on a client that it hears nothing more of.
PATIENCE = 60.0
HUGE = 8 << 20


@dataclass(slots=True)
class Served:
    """What the engine did with one call. `sent` ids went out; `whole`: all of its answer did."""

    attempts: int = 0
    sent: int = 0
    whole: bool = False
    told_to_stop: bool = False
    #: Whether the first attempt came over a connection that had served a call before.
    reused: bool = False


class Engine:
    """Serves on a loopback port while its block lasts. `pause` is the time between two tokens, in seconds."""

    def __init__(
        self, *, model: str = "my-policy", version: str = "0.32.0", port: int = 0, pause: float = 0.01
    ) -> None:
        self.model = model
        self.version = version
        self.port = port
        self.pause = pause
        self.ledger: dict[str, Served] = {}
        self.unnamed = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Its port is closed and every connection broken off, as when it dies."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        used = False
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                method, path, _ = head.split(b" ", 2)
                length = int(head.split(b"content-length: ")[1].split(b"\r")[0]) if b"content-length: " in head else 0
                raw = await reader.readexactly(length)
                if method == b"get":
                    used = True
                    writer.write(self._side(path.decode()))
                    continue
                found = named(raw)
                if found is None:
                    self.unnamed += 1
                    writer.write(_answer(400, {"error": {"message": "this call has no name", "code": 400}}))
                    continue
                turn = Turn(self, reader, writer, path.decode(), json.loads(raw), *found)
                served = self.ledger.setdefault(turn.name, Served())
                served.attempts += 1
                served.reused |= used and served.attempts == 1
                used = True
                turn.served = served
                await BEHAVIOURS[turn.kind](turn)
        except (asyncio.IncompleteReadError, ConnectionError, Over, asyncio.CancelledError):
            pass  # the other side is gone, or `stop` ends us
        finally:
            writer.close()

    def _side(self, path: str) -> bytes:
        if path == "/version":
            return _answer(200, {"version": self.version})
        if path == "/v1/models":
            row = {"id": self.model, "object": "model", "owned_by": "vllm"}
            return _answer(200, {"object": "list", "data": [row]})
        return _answer(404, {"detail": "Not Found"})


class Over(Exception):
    """This connection is of no more use."""


@dataclass
class Turn:
    """One call that is being answered."""

    engine: Engine
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    path: str
    body: dict[str, Any]
    name: str
    kind: str
    tokens: int
    served: Served = field(default_factory=Served)

    def __post_init__(self) -> None:
        self.chat = self.path.endswith("/chat/completions")
        self.ids = sampled_ids(self.name, self.tokens)
        self.streams = bool(self.body.get("stream"))
        self.wants_ids = bool(self.body.get("return_token_ids"))
        asked = self.body.get("logprobs")
        self.wants_logprobs = asked is not None and asked is not False  # 0 alternatives are asked for, too
        self.half = len(self.ids) // 2
        kind = "chat.completion" if self.chat else "text_completion"
        self.base = {"id": f"cmpl-{self.name}", "object": kind, "created": 1_795_962_804, "model": self.engine.model}

    # a whole answer

    def whole(self) -> bytes:
        text = "".join(word(token_id) for token_id in self.ids)
        choice: dict[str, Any] = {"index": 0, "logprobs": self._logprobs(self.ids), "finish_reason": "stop"}
        choice["token_ids"] = self.ids if self.wants_ids else None
        prompt = prompt_ids(self.name)
        body: dict[str, Any] = {**self.base, "choices": [choice], "usage": self._usage()}
        place = body if self.chat else choice
        place["prompt_token_ids"] = prompt if self.wants_ids else None
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return _answer(200, body)

    # a stream

    def head(self) -> bytes:
        lines = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        if not self.chat:
            return lines
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return lines + self._event([choice], prompt_token_ids=prompt_ids(self.name) if self.wants_ids else None)

    def token(self, place: int, text: str | None = None) -> bytes:
        token_id = self.ids[place]
        last = place == len(self.ids) - 1
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if last else None}
        choice["logprobs"] = self._logprobs([token_id])
        choice["token_ids"] = [token_id] if self.wants_ids else None
        content = word(token_id) if text is None else text
        if self.chat:
            choice["delta"] = {"content": content}
        else:
            choice["text"] = content
            choice["prompt_token_ids"] = prompt_ids(self.name) if self.wants_ids and place == 0 else None
        self.served.sent += 1
        return self._event([choice])

    def end(self) -> bytes:
        options = self.body.get("stream_options") or {}
        usage = self._event([], usage=self._usage()) if options.get("include_usage") else b""
        return usage + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return _chunk(
            b"data: " + json.dumps({**self.base, "object": kind, "choices": choices, **more}).encode() + b"\n\n"
        )

    def _usage(self) -> dict[str, int]:
        prompt = len(prompt_ids(self.name))
        return {"prompt_tokens": prompt, "completion_tokens": len(self.ids), "total_tokens": prompt + len(self.ids)}

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        if self.chat:
            rows: list[dict[str, Any]] = [
                {"token": word(token_id), "logprob": logprob(token_id), "bytes": None, "top_logprobs": []}
                for token_id in ids
            ]
            return {"content": rows}
        return {
            "token_logprobs": [logprob(token_id) for token_id in ids],
            "tokens": [word(token_id) for token_id in ids],
        }

    # how it goes out

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def tokens_until(self, stop: int) -> None:
        await self.write(self.head())
        for place in range(stop):
            await self.write(self.token(place))
            await asyncio.sleep(self.engine.pause)

    async def until_gone(self) -> None:
        """Until the other side closes the connection."""
        async with asyncio.timeout(PATIENCE):
            while await self.reader.read(1 << 16):
                pass
        self.served.told_to_stop = True
        raise Over

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
        raise Over


# what happens to calls


async def plain(turn: Turn) -> None:
    if not turn.streams:
        await asyncio.sleep(turn.engine.pause * turn.tokens)
        turn.served.sent = turn.tokens
        await turn.write(turn.whole())
    else:
        await turn.tokens_until(turn.tokens)
        await turn.write(turn.end())
    turn.served.whole = True


async def trickle(turn: Turn) -> None:
    turn.served.sent = 0 if turn.streams else turn.tokens
    data = turn.whole()
    if turn.streams:
        data = turn.head() + b"".join(turn.token(place) for place in range(turn.tokens)) + turn.end()
    for place in range(len(data)):
        await turn.write(data[place : place + 1])
        await asyncio.sleep(0)
    turn.served.whole = True


async def huge(turn: Turn) -> None:
    await turn.tokens_until(turn.half)
    await turn.write(turn.token(turn.half, "x" * HUGE))
    for place in range(turn.half + 1, turn.tokens):
        await turn.write(turn.token(place))
    await turn.write(turn.end())
    turn.served.whole = True


async def garbled(turn: Turn) -> None:
    await turn.tokens_until(turn.half)
    await turn.write(_chunk(b'data: {"choices": [{"index": 0, \n\n'))
    for place in range(turn.half, turn.tokens):
        await turn.write(turn.token(place))
    await turn.write(turn.end())
    turn.served.whole = True


def says(status: int) -> Callable[[Turn], Awaitable[None]]:
    async def answer(turn: Turn) -> None:
        error = {"message": f"told to answer {status}", "type": "TestError", "param": None, "code": status}
        await turn.write(_answer(status, {"error": error}, "retry-after: 0\r\n"))
        turn.served.whole = True

    return answer


async def cut(turn: Turn) -> None:
    if turn.streams:
        await turn.tokens_until(turn.half)
    else:
        await turn.write(turn.whole()[:-20])
    raise Over


async def reset(turn: Turn) -> None:
    if turn.streams:
        await turn.tokens_until(max(1, turn.half))
    else:
        await turn.write(turn.whole()[:-20])
    await asyncio.sleep(0.05)  # a reset throws away what is still on its way; the head must not be
    turn.reset()


async def refused(turn: Turn) -> None:
    turn.reset()


async def noise(turn: Turn) -> None:
    await turn.write(b"\x00\xffnoise, no HTTP\r\n\r\n" * 4)
    raise Over


async def fails(turn: Turn) -> None:
    await turn.tokens_until(turn.half)
    error = {"message": "told to fail", "type": "InternalServerError", "param": None, "code": 500}
    await turn.write(_chunk(b"data: " + json.dumps({"error": error}).encode() + b"\n\n"))
    await turn.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def stall(turn: Turn) -> None:
    await turn.tokens_until(turn.half)
    await turn.until_gone()


async def mute(turn: Turn) -> None:
    await turn.until_gone()


async def leaves(turn: Turn) -> None:
    if turn.streams:
        await turn.tokens_until(max(1, turn.half))
    await turn.until_gone()


BEHAVIOURS: dict[str, Callable[[Turn], Awaitable[None]]] = {
    "plain": plain, "trickle": trickle, "huge": huge, "garbled": garbled, "busy": says(429), "broken": says(500),
    "overloaded": says(503), "cut": cut, "reset": reset, "refused": refused, "noise": noise, "fails": fails,
    "stall": stall, "mute": mute, "leaves": leaves, "unsent": says(500),
}  # fmt: skip
assert set(BEHAVIOURS) == set(KINDS)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _answer(status: int, body: Any, more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{more}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data
