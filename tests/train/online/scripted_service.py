"""A rollout service that answers as a test says: for the client and the adapters, not a model of `bench serve`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: One answer: a status, headers, and the parts of its body; `None` as a part drops the connection there.
Answer = tuple[int, Mapping[str, str], list[bytes | None]]
KEY = "k-1"


def ndjson(*rows: Mapping[str, Any]) -> list[bytes | None]:
    return [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows]


def verdict(key: str, records: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    return {
        "schema_version": "benchflow.group-verdict.v1", "key": key, "task": "write-number", "size": len(records),
        "purpose": "train", "state": "complete", "reason": None, "detail": None,
        "rollouts": [record["rollout"] for record in records], "advantages": [0.0] * len(records),
        "advantage_kind": "grpo", "group_mean": 0.5, "group_std": 0.5, "ddof": 0, "eps": 1e-8,
    } | given  # fmt: skip


class ScriptedService:
    """`answer` gets method, path and body; `requests` are all that came, in order."""

    def __init__(self, answer: Callable[[str, str, Any], Answer]) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                service.requests.append((self.command, self.path, body))
                status, headers, parts = answer(self.command, self.path, body)
                if self.headers.get("Authorization") != f"Bearer {KEY}":
                    status, headers, parts = refusal(401, "this is not the key of the service")
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for part in parts:
                    if part is None:
                        self.wfile.flush()
                        self.close_connection = True
                        self.connection.close()
                        return
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")

            do_GET = do_POST = do_DELETE = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # connections are dropped on purpose

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def refusal(status: int, message: str, **headers: str) -> Answer:
    body = json.dumps({"error": {"message": message, "type": "x", "code": "y"}}).encode()
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, [body]


def ok(body: Mapping[str, Any]) -> Answer:
    return 200, {}, [json.dumps(body).encode()]


@contextmanager
def scripted_service(answer: Callable[[str, str, Any], Answer]) -> Iterator[ScriptedService]:
    service = ScriptedService(answer)
    thread = threading.Thread(target=service.serve, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join()
