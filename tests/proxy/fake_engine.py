"""A double of an engine's HTTP side: it answers with bytes that a test gives it, well or badly.

It stands beside tests of the real thing (the embedded llama.cpp in `test_real_engine.py`, vLLM and SGLang in
`tests/live`). The bytes it sends are recorded from real engines unless a test is about bytes no engine should send.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

TRANSCRIPTS = Path(__file__).parents[1] / "capture" / "transcripts"


@dataclass
class Seen:
    """One request as the engine saw it."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def body(self) -> Any:
        return json.loads(self.raw) if self.raw else None


Answer = Callable[[Seen], AsyncIterator[bytes]]


class FakeEngine:
    """Serves on a free loopback port while its block lasts. `answers` are used up one a call; the last one stays.

    A connection on which nothing comes for `keep` seconds is closed, as Uvicorn does after 5. With `tls` it listens
    behind TLS.
    """

    def __init__(
        self,
        *answers: Answer,
        engine: str = "vllm",
        keep: float | None = None,
        models: Sequence[str] = ("my-policy",),
        adapters: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.answers = list(answers)
        self.engine = engine
        self.models = models
        self.adapters = adapters
        self.keep = keep
        self.tls = tls
        self.seen: list[Seen] = []
        self.connections = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listens on `port`, or on a free one; after `stop`, on `self.port`, it is the engine that came back."""
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port, reuse_address=True, ssl=self.tls)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the port and every connection."""
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def calls(self) -> list[Seen]:
        """The model calls, without what the proxy asked to know the engine."""
        return [request for request in self.seen if request.method == "POST"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = await self._head(reader)
                first, *lines = head.decode("latin-1").split("\r\n")
                method, path, _ = first.split(" ")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                seen = Seen(method, path, headers, raw)
                self.seen.append(seen)
                if method == "GET":
                    writer.write(self._side(path))
                    continue
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                watch = asyncio.ensure_future(self._watch(reader, seen))
                try:
                    async for piece in answer(seen):
                        writer.write(piece)
                        await writer.drain()
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, Cut):
            pass
        finally:
            writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.keep)
        except TimeoutError:
            if not reader._buffer:  # what came in the same moment is answered, as Uvicorn does
                raise
            return await reader.readuntil(b"\r\n\r\n")

    async def _watch(self, reader: asyncio.StreamReader, seen: Seen) -> None:
        while not reader.at_eof():
            await asyncio.sleep(0.01)
        seen.gone.set()

    def _side(self, path: str) -> bytes:
        known = {"vllm": {"/version": {"version": "0.32.0"}}, "sglang": {"/get_model_info": {"model_path": "m"}}}
        body = known.get(self.engine, {}).get(path)
        if path.startswith("/v1/models"):
            rows = [{"id": name, "object": "model", "owned_by": self.engine} for name in self.models]
            adapters = [{"id": name, "object": "model", "parent": self.models[0]} for name in self.adapters]
            body = {"object": "list", "data": rows + adapters}
        return whole(404, {"detail": "Not Found"}) if body is None else whole(200, body)


class Cut(Exception):
    """The engine dies here: its connection closes without an end."""


def whole(status: int, body: Any, **headers: str) -> bytes:
    """A complete HTTP answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} X\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data


def answers(status: int, body: Any, **headers: str) -> Answer:
    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        yield whole(status, body, **headers)

    return answer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def streams(
    data: bytes, *, size: int = 1 << 20, pause: float = 0, then: Callable[[Seen], Awaitable[None]] | None = None,
    end: bool = True,
) -> Answer:  # fmt: skip
    """A stream of `data` in pieces of `size` bytes; `then` runs before the end, which `end=False` leaves out."""

    async def answer(seen: Seen) -> AsyncIterator[bytes]:
        yield SSE_HEAD
        for start in range(0, len(data), size):
            yield chunk(data[start : start + size])
            if pause:
                await asyncio.sleep(pause)
        if then is not None:
            await then(seen)
        if not end:
            raise Cut
        yield b"0\r\n\r\n"

    return answer


def transcript(name: str) -> tuple[dict[str, Any], bytes]:
    """What was recorded from a real engine: the call, and the bytes of its answer."""
    recorded = json.loads((TRANSCRIPTS / f"{name}.json").read_text())
    return recorded, (TRANSCRIPTS / f"{name}.body").read_bytes()


def replays(name: str, **options: Any) -> Answer:
    recorded, data = transcript(name)
    if recorded["response"]["headers"]["content-type"].startswith("text/event-stream"):
        return streams(data, **options)
    return answers(recorded["response"]["status"], data)
