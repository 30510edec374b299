"""FakeEngine: a test double of vLLM 0.32's server, in the standard library alone. It says the same four tokens always.

It takes the arguments that `vllm serve` takes, checks the key, and answers chat calls, streamed or not, with ids and
logprobs only where they were asked for, as vLLM does.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT_IDS = [1, 4093, 198, 28120, 2, 198, 1, 520, 9531, 198]
SAMPLED = [("Four", 25470, -0.25), (" to", 288, -0.5), ("kens", 19234, -0.125), ("", 2, -0.0625)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="none")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key")
    arguments, _ = parser.parse_known_args()
    server = FakeEngine(
        (arguments.host, arguments.port), arguments.served_model_name or arguments.model, arguments.api_key
    )
    print(f"FakeEngine on {arguments.host}:{server.server_port}", flush=True)
    server.serve_forever()


class FakeEngine(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], name: str, key: str | None) -> None:
        super().__init__(address, Handler)
        self.name, self.key = name, key


class Handler(BaseHTTPRequestHandler):
    server: FakeEngine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, b"")
        elif self.path == "/version":
            self.answer(200, {"version": "0.32.0"})
        elif self.path == "/v1/models" and self.authorized():
            self.answer(
                200, {"object": "list", "data": [{"id": self.server.name, "object": "model", "owned_by": "vllm"}]}
            )
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if not self.authorized():
            self.answer(401, {"error": "Unauthorized"})
        elif self.path != "/v1/chat/completions":
            self.answer(404, {"detail": "Not Found"})
        elif body.get("stream"):
            self.stream(body)
        else:
            self.answer(200, self.completion(body))

    def authorized(self) -> bool:
        key = self.server.key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        entries = [entry(*token) for token in SAMPLED]
        wanted = bool(body.get("return_token_ids"))
        return {
            **self.head("chat.completion"),
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "".join(text for text, _, _ in SAMPLED)},
                    "logprobs": {"content": entries} if body.get("logprobs") else None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": [token for _, token, _ in SAMPLED] if wanted else None,
                }
            ],
            "usage": usage(),
            "prompt_token_ids": PROMPT_IDS if wanted else None,
        }

    def stream(self, body: dict[str, Any]) -> None:
        wanted = bool(body.get("return_token_ids"))
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunks: list[dict[str, Any]] = [{"choices": [first], "prompt_token_ids": PROMPT_IDS if wanted else None}]
        for number, (text, token, logprob) in enumerate(SAMPLED, 1):
            choice = {
                "index": 0,
                "delta": {"content": text},
                "logprobs": {"content": [entry(text, token, logprob)]} if body.get("logprobs") else None,
                "finish_reason": "stop" if number == len(SAMPLED) else None,
                "token_ids": [token] if wanted else None,
            }
            chunks.append({"choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": usage()})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.piece(f"data: {json.dumps({**self.head('chat.completion.chunk'), **chunk})}\n\n".encode())
        self.piece(b"data: [DONE]\n\n")
        self.piece(b"")

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-fake", "object": kind, "created": 0, "model": self.server.name}

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def answer(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def entry(text: str, token: int, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def usage() -> dict[str, int]:
    prompt, sampled = len(PROMPT_IDS), len(SAMPLED)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


if __name__ == "__main__":
    main()
