"""The part of the attempt list that is made from inside: raw requests of an agent in a real container, all refused.

The whole list stands in `tests/proxy/test_attacks.py`. The engine behind the proxy is the embedded llama.cpp.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from capture.journal.journal import JournalReader
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.rollouts.model_endpoint import Provider
from tests.sandbox.support import ShellAgent, attempt, make_task

pytestmark = pytest.mark.docker

ENGINE_KEY = "sk-engine-of-the-operator"
INSIDE = r"""python3 - <<'END'
import json, os, socket
base, key = os.environ["BENCHFLOW_PROVIDER_BASE_URL"], os.environ["BENCHFLOW_PROVIDER_API_KEY"]
host, port = base.split("//")[1].split("/")[0].split(":")
body = json.dumps({"model": "http://169.254.169.254/", "max_tokens": 2,
                   "messages": [{"role": "user", "content": "hi\r\nhost: x"}]})
auth = "authorization: Bearer " + key
def tell(name, data):
    got = b""
    try:
        with socket.create_connection((host, int(port)), 20) as line:
            line.settimeout(120)
            line.sendall(data.encode("latin-1"))
            while part := line.recv(65536):
                got += part
    except OSError:
        pass
    parts = [one[:3].decode() for one in got.split(b"HTTP/1.1 ")[1:]]
    print("TRY", name, ",".join(parts) or "none")
    print("GOT", got.replace(b"\n", b" "))
def post(target, *lines, body=body, length=True):
    lines = [f"POST {target} HTTP/1.1", "host: h", "connection: close", *lines]
    if length: lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]) + body
chat = "/v1/chat/completions"
tell("own", post(chat, auth))
tell("absolute", post("http://169.254.169.254/latest/meta-data", auth))
tell("connect", f"CONNECT {host}:22 HTTP/1.1\r\nhost: h\r\n{auth}\r\n\r\n")
tell("other-route", post("/v1/chat/completions/../../completion", auth))
tell("slots", f"GET /v1/models/../../slots HTTP/1.1\r\nhost: h\r\nconnection: close\r\n{auth}\r\n\r\n")
tell("named", post("/s/default" + chat, auth))
tell("trailer", post(chat, "transfer-encoding: chunked", length=False,
                     body=f"{len(body):x}\r\n{body}\r\n0\r\n{auth}\r\n\r\n"))
tell("two-lengths", post(chat, auth, "transfer-encoding: chunked", body="0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"))
tell("split", post(chat + "%0d%0ahost:x", auth))
tell("huge-head", post(chat, auth, "x: " + "a" * (2 << 20)))
tell("page", post(chat, "origin: https://evil.example"))
mine, reached = int(port), []
for other in [*range(mine - 40, mine), *range(mine + 1, mine + 40)]:
    try:
        socket.create_connection((host, other), 0.1).close()
        reached.append(other)
    except OSError:
        pass
print("NEIGHBOURS", reached)
END
"""
EXPECTED = {
    "own": {"200"}, "absolute": {"404"}, "connect": {"400"}, "other-route": {"404"}, "slots": {"404"},
    "named": {"401"}, "trailer": {"401"}, "two-lengths": {"400"}, "split": {"404"}, "huge-head": {"431", "none"},
    "page": {"401", "403"},
}  # fmt: skip


def test_raw_requests_from_inside_a_sandbox_are_refused(tmp_path: Path, engine: EmbeddedEngine) -> None:
    provider = Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, ENGINE_KEY, True)
    task = make_task(tmp_path, agent="timeout_sec: 250")
    seen = attempt(tmp_path, task, ShellAgent(INSIDE, needs_model=True), provider=provider)
    result = dict(line.split()[1:3] for line in seen.said.splitlines() if line.startswith("TRY "))
    assert set(result) == set(EXPECTED), seen.said
    assert {name: result[name] for name in result if result[name] not in EXPECTED[name]} == {}
    address = engine.base_url.partition("//")[2].partition("/")[0]
    assert ENGINE_KEY not in seen.said and address not in seen.said
    assert "NEIGHBOURS []" in seen.said, "no other port of this machine near the proxy's, such as its admin routes'"
    calls = list(JournalReader(seen.folder / "trajectory/llm_trajectory.jsonl"))
    assert [call.outcome for call in calls] == ["ok"], "only what was its own is a call"
    assert calls[0].request_body["model"] == "http://169.254.169.254/"
