"""Which method and path reach what: 405 with Allow, HEAD, one model, an address without a session's name."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from proxy import Settings, serve
from tests.proxy.conftest import Started
from tests.proxy.fake_engine import FakeEngine, replays
from tests.proxy.raw import exchange, statuses

PLAIN = "vllm/chat-plain-length-nostream"
CHAT = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}


def get(path: str) -> bytes:
    """The bytes of a GET: httpx resolves `..`."""
    return f"GET {path} HTTP/1.1\r\nhost: proxy\r\nconnection: close\r\n\r\n".encode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"])
async def test_another_method_on_a_model_route_is_405(started: Started, method: str, path: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        answer = await bench.client.request(method, path.removeprefix("/v1"))
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.content == b"" if method == "HEAD" else "not served" in answer.json()["error"]["message"]
        assert engine.seen == [] and bench.calls() == []


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_another_method_on_a_route_to_read_is_405(started: Started, method: str, path: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        answer = await bench.client.request(method, root + path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
        assert engine.seen == []


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/my-policy", "/health", "/"])
async def test_head_is_get_without_its_body(started: Started, path: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        url = bench.proxy.base_url.removesuffix("/v1") + path
        get, head = await bench.client.get(url), await bench.client.head(url)
    assert (get.status_code, head.status_code, head.content) == (200, 200, b"")
    assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))


@pytest.mark.parametrize("name", ["my-policy", "org/name", "caf%C3%A9", "a%20b"])
async def test_one_model_is_the_engines_entry(started: Started, name: str) -> None:
    ids = ["other", "my-policy", "org/name", "café", "a b"]
    async with FakeEngine(replays(PLAIN), models=ids) as engine, started(engine.url) as bench:
        answer = await bench.client.get(f"/models/{name}")
    assert answer.status_code == 200
    assert answer.json() == {"id": httpx.URL(f"/{name}").path[1:], "object": "model", "owned_by": "vllm"}


@pytest.mark.parametrize("name", ["my", "My-Policy", "my-policy-2", "my-policy/x", "%22%7D"])
async def test_a_model_that_the_engine_does_not_serve_is_404(started: Started, name: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        answer = await bench.client.get(f"/models/{name}")
    assert answer.status_code == 404 and "the engine serves no model" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name",
    ["gpt-5", "org/name", "llama3.1:8b", "a..b", "..name", ".hidden", "name.", "caf%C3%A9", "org%2Fname", "a@b+c"],
)
async def test_with_a_model_of_the_settings_every_name_is_that_model(started: Started, name: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, model="my-policy") as bench:
        assert statuses(await exchange(bench.proxy.port, get(f"/v1/models/{name}"))) == [200]


@pytest.mark.parametrize(
    "name",
    [
        "../../slots", "..", ".", "./slots", "x/../slots", "x/./y", "x/..", "%2e%2e/%2e%2e/slots", ".%2E/slots",
        "..%2f..%2fslots", "//..//slots", "..\\..\\slots", "..%5cslots", "..;/slots", "x;/../slots", "slots;a=b",
        "%252e%252e/slots", "..%00/slots", "x%0d%0ay", "x%7f",
    ],
)  # fmt: skip
async def test_a_path_is_not_a_name_of_the_model_of_the_settings(started: Started, name: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, model="my-policy") as bench:
        answer = await exchange(bench.proxy.port, get(f"/v1/models/{name}"))
    assert statuses(answer) == [404] and b"the engine serves no model" in answer


@pytest.mark.parametrize("session", ["..", ".", "%2e%2e", "..%5c", "..;", "%252e"])
async def test_a_path_is_not_a_name_of_a_session(started: Started, tmp_path: Path, session: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url, model="my-policy") as bench:
        answer = await exchange(bench.proxy.port, get(f"/s/{session}/v1/models"))
        assert statuses(answer) == [400]
        assert [folder.name for folder in (tmp_path / "captures").iterdir()] == ["default"]


async def test_an_engine_may_name_its_model_by_a_path(started: Started) -> None:
    """llama.cpp's id of a model is the path it was loaded from."""
    ids = ["../models/tiny.gguf"]
    async with FakeEngine(replays(PLAIN), models=ids) as engine, started(engine.url, model=ids[0]) as bench:
        answer = await exchange(bench.proxy.port, get(f"/v1/models/{ids[0]}"))
    assert statuses(answer) == [200] and b'"../models/tiny.gguf"' in answer


@pytest.mark.parametrize(
    "path", ["/s//v1/chat/completions", "//s///v1/chat/completions", "/s/v1/chat/completions", "/s", "/s/"]
)
async def test_an_address_without_a_sessions_name_is_refused(started: Started, tmp_path: Path, path: str) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        root = bench.proxy.base_url.removesuffix("/v1")
        answer = await bench.client.post(root + path, json=CHAT)
        assert answer.status_code == 400 and "names no session" in answer.json()["error"]["message"]
        assert engine.seen == [] and [folder.name for folder in (tmp_path / "captures").iterdir()] == ["default"]


async def test_what_the_admin_routes_do_not_have_is_json_too() -> None:
    async with FakeEngine(replays(PLAIN)) as engine:
        settings = Settings(upstream=[engine.url], probe=False, admin_port=0, admin_key="admin")
        async with serve(settings) as proxy, httpx.AsyncClient(base_url=proxy.admin_url or "") as admin:
            unknown, wrong = await admin.get("/session"), await admin.get("/policy")
    assert unknown.status_code == 404 and "there is no GET /session here" in unknown.json()["error"]["message"]
    assert wrong.status_code == 405 and "there is no GET /policy here" in wrong.json()["error"]["message"]
    assert wrong.headers["allow"] == "POST"
