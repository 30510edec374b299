"""A fast double of vLLM's HTTP side, for the benchmark: the chunks of vLLM 0.32, sent at a set pace, cheaply.

    python -m benchmarks.proxy.fake_vllm [--port 0]

It answers as vLLM does to what it was asked: prompt ids and `token_ids` where `return_token_ids` is set, logprobs where
`logprobs` is, the count where `include_usage` is, a whole body where `stream` is not. How many tokens it samples is the
request's `max_tokens`; the pace and the prompt's length are set by `POST /pace {"interval_ms", "prompt_ids"}`. Its
chunks are made once, and a chunk costs it one `send`: one thread on epoll, no framework.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

#: Tokens of a recorded answer of vLLM 0.32 (SmolLM2), with their logprobs and ids.
TOKENS = (
    ("The", -2.3862032890319824, 504), (" two", -0.7807715535163879, 827), (" most", -0.8000314831733704, 768),
    (" popular", -0.9864662289619446, 2378), (" colours", -0.6568868160247803, 14797),
    (" in", -1.2861065864562988, 281),
    (" the", -0.708636462688446, 260), (" world", -0.9743765592575073, 905), (" are", -0.2754320204257965, 359),
    (":", -1.6258412599563599, 42),
)  # fmt: skip
HEAD = {"id": "chatcmpl-94c4843a4d72276a", "object": "chat.completion.chunk", "created": 1795962789, "model": "policy"}
SYSTEM = "vllm-0.32.0-1db4b656"
#: Without a pace, this many events leave in one `send`: an engine that is far ahead of its reader.
BURST = 32
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 14:33:08 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST = b"0\r\n\r\n"


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def frame(event: bytes) -> bytes:
    """One event, in a chunk of HTTP of its own."""
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


class Answers:
    """The bytes of answers, made once for each kind of request."""

    def __init__(self) -> None:
        self.prompt_ids = 100
        self._made: dict[Any, Any] = {}

    def pace(self, prompt_ids: int) -> None:
        self.prompt_ids = prompt_ids
        self._made.clear()

    def prompt(self) -> list[int]:
        """Ids as a chat's are: mostly common ones."""
        chosen = random.Random(7)
        return [min(49151, int(chosen.paretovariate(0.6))) for _ in range(self.prompt_ids)]

    def stream(self, body: dict[str, Any]) -> list[bytes]:
        """The frames of one streamed chat completion."""
        tokens, ids, logprobs = wants(body)
        usage = bool((body.get("stream_options") or {}).get("include_usage"))
        key = (tokens, ids, logprobs, usage)
        if key not in self._made:
            self._made[key] = list(self._frames(tokens, ids, logprobs, usage))
        return self._made[key]

    def _frames(self, tokens: int, ids: bool, logprobs: bool, usage: bool) -> Iterator[bytes]:
        first: dict[str, Any] = {
            **HEAD,
            "choices": [
                {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            ],
        }
        if ids:
            first |= {"prompt_token_ids": self.prompt(), "prompt_text": None}
        yield frame(dumps(first))
        for number in range(tokens):
            text, value, token_id = TOKENS[number % len(TOKENS)]
            choice: dict[str, Any] = {
                "index": 0,
                "delta": {"content": text},
                "logprobs": {"content": [logprob(text, value)]} if logprobs else None,
                "finish_reason": None,
            }
            if number == tokens - 1:
                choice |= {"finish_reason": "length", "stop_reason": None}
            yield frame(dumps({**HEAD, "choices": [{**choice, "token_ids": [token_id] if ids else None}]}))
        if usage:
            yield frame(dumps({**HEAD, "choices": [], "usage": self._usage(tokens), "system_fingerprint": SYSTEM}))
        yield frame(b"[DONE]") + LAST

    def whole(self, body: dict[str, Any]) -> bytes:
        """One completed chat completion, head and body."""
        tokens, ids, logprobs = wants(body)
        key = ("whole", tokens, ids, logprobs)
        if key not in self._made:
            values = [TOKENS[number % len(TOKENS)] for number in range(tokens)]
            entries = [logprob(text, value) for text, value, _ in values]
            answer = {
                **HEAD,
                "object": "chat.completion",
                "choices": [
                    {
                        "index": 0,
                        "message": {
                            "role": "assistant", "content": "".join(text for text, _, _ in values), "refusal": None,
                            "annotations": None, "audio": None, "function_call": None, "reasoning": None,
                        },
                        "logprobs": {"content": entries} if logprobs else None,
                        "finish_reason": "length",
                        "stop_reason": None,
                        "token_ids": [token_id for _, _, token_id in values] if ids else None,
                        "routed_experts": None,
                    }
                ],
                "service_tier": None,
                "system_fingerprint": SYSTEM,
                "usage": self._usage(tokens),
                "prompt_logprobs": None,
                "prompt_token_ids": self.prompt() if ids else None,
                "prompt_text": None,
                "kv_transfer_params": None,
            }  # fmt: skip
            self._made[key] = reply(answer)
        return self._made[key]

    def _usage(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_ids, "total_tokens": self.prompt_ids + tokens, "completion_tokens": tokens,
        }  # fmt: skip


def wants(body: dict[str, Any]) -> tuple[int, bool, bool]:
    return body.get("max_tokens") or 16, bool(body.get("return_token_ids")), bool(body.get("logprobs"))


def reply(value: Any, status: bytes = b"200 OK") -> bytes:
    data = dumps(value)
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data)


class Peer:
    """One connection, and the answer that is on its way."""

    __slots__ = ("due", "fd", "frames", "next", "out", "read", "sock", "stalled")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.read = bytearray()
        self.out = b""
        self.frames: list[bytes] | None = None
        self.next = 0
        self.due = 0.0
        self.stalled = False


class Engine:
    def __init__(self, port: int = 0) -> None:
        self.listening = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listening.setblocking(False)
        self.port = self.listening.getsockname()[1]
        self.answers = Answers()
        self.interval = 0.0
        self.peers: dict[int, Peer] = {}
        self.due: list[tuple[float, int, Peer]] = []
        self.epoll = select.epoll()
        self.epoll.register(self.listening, select.EPOLLIN)

    def run(self) -> None:
        door = self.listening.fileno()
        while True:
            left = -1.0 if not self.due else max(0.0, self.due[0][0] - time.perf_counter())
            # epoll counts in milliseconds, rounded up: what is due within one is sent with this round.
            for fd, event in self.epoll.poll(left):
                if fd == door:
                    self.accept()
                elif (peer := self.peers.get(fd)) is not None:
                    if event & (select.EPOLLHUP | select.EPOLLERR):
                        self.drop(peer)
                    elif event & select.EPOLLIN:
                        self.receive(peer)
                    elif event & select.EPOLLOUT:
                        self.flush(peer)
            now = time.perf_counter()
            while self.due and self.due[0][0] <= now:
                _, _, peer = heapq.heappop(self.due)
                if peer.frames is not None:
                    self.step(peer)

    def accept(self) -> None:
        while True:
            try:
                sock, _ = self.listening.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.peers[sock.fileno()] = Peer(sock)
            self.epoll.register(sock, select.EPOLLIN)

    def receive(self, peer: Peer) -> None:
        try:
            data = peer.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(peer)
            return
        peer.read += data
        head = peer.read.find(b"\r\n\r\n")
        if head < 0:
            return
        lines = bytes(peer.read[:head]).split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line[:15].lower() == b"content-length:"), 0)
        if len(peer.read) < head + 4 + length:
            return
        body = bytes(peer.read[head + 4 : head + 4 + length])
        del peer.read[: head + 4 + length]
        self.answer(peer, lines[0].split()[1].decode(), json.loads(body) if body else {})

    def answer(self, peer: Peer, path: str, body: dict[str, Any]) -> None:
        if path == "/pace":
            self.interval = body["interval_ms"] / 1000
            self.answers.pace(body["prompt_ids"])
            self.send(peer, reply({}))
        elif path == "/version":
            self.send(peer, reply({"version": "0.32.0"}))
        elif path == "/health":
            self.send(peer, reply({}))
        elif path == "/v1/models":
            model = {"id": "policy", "object": "model", "owned_by": "vllm"}
            self.send(peer, reply({"object": "list", "data": [model]}))
        elif path != "/v1/chat/completions":
            self.send(peer, reply({"detail": "Not Found"}, b"404 Not Found"))
        elif not body.get("stream"):
            self.send(peer, self.answers.whole(body))
        else:
            peer.frames = self.answers.stream(body)
            peer.next = 0
            peer.due = time.perf_counter()
            self.send(peer, STREAM_HEAD)
            self.step(peer)

    def step(self, peer: Peer) -> None:
        """The next event, or without a pace the next burst. The first token comes with the opening event."""
        frames = peer.frames
        if frames is None:
            return
        if peer.out:
            peer.stalled = True
            return
        take = BURST if not self.interval else 1 if peer.next else 2
        self.send(peer, b"".join(frames[peer.next : peer.next + take]))
        peer.next += take
        if peer.next >= len(frames):
            peer.frames = None
        elif self.interval:
            peer.due += self.interval
            heapq.heappush(self.due, (peer.due, peer.fd, peer))
        else:
            heapq.heappush(self.due, (0.0, peer.fd, peer))

    def send(self, peer: Peer, data: bytes) -> None:
        if peer.out:
            peer.out += data
            return
        try:
            sent = peer.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.drop(peer)
            return
        if sent < len(data):
            peer.out = data[sent:]
            self.epoll.modify(peer.fd, select.EPOLLIN | select.EPOLLOUT)

    def flush(self, peer: Peer) -> None:
        data, peer.out = peer.out, b""
        self.send(peer, data)
        if not peer.out and peer.fd in self.peers:
            self.epoll.modify(peer.fd, select.EPOLLIN)
            if peer.stalled:
                peer.stalled = False
                self.step(peer)

    def drop(self, peer: Peer) -> None:
        peer.frames = None
        if self.peers.pop(peer.fd, None) is not None:
            self.epoll.unregister(peer.fd)
            peer.sock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    engine = Engine(parser.parse_args().port)
    print(engine.port, flush=True)
    engine.run()


if __name__ == "__main__":
    main()
