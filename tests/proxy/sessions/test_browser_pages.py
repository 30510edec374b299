"""What a web page of another site can make an open proxy do: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import FakeEngine, replays

PLAIN = "vllm/chat-plain-length-nostream"
CHAT = {"model": "my-policy", "messages": [{"role": "user", "content": "hi"}]}


def at(bench: Bench, path: str) -> str:
    return bench.proxy.base_url.removesuffix("/v1") + path


@pytest.mark.parametrize("path", ["/s/evil/v1/models", "/s/evil/v1/models/my-policy", "/s/evil/health", "/s/evil"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT"])
async def test_only_a_call_opens_a_session(started: Started, tmp_path: Path, method: str, path: str) -> None:
    """Also without the headers of a browser: an old one, or a page by a name of its own, sends none."""
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        await bench.client.request(method, at(bench, path))
        assert [session.name for session in bench.proxy.sessions] == ["default"]
        assert [folder.name for folder in (tmp_path / "captures").iterdir()] == ["default"]


async def test_an_agent_may_ask_for_models_before_its_first_call(started: Started) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        assert (await bench.client.get(at(bench, "/s/mine/v1/models"))).json()["data"][0]["id"] == "my-policy"
        assert (await bench.client.post(at(bench, "/s/mine/v1/chat/completions"), json=CHAT)).status_code == 200
        assert {session.name for session in bench.proxy.sessions} == {"default", "mine"}
        assert (await bench.client.get(at(bench, "/s/-no/v1/models"))).status_code == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "http://localhost:3000"}, 200),
        ({"sec-fetch-site": "cross-site", "origin": "vscode-webview://x"}, 200),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_a_browser_says_of_the_page_decides(
    started: Started, method: str, headers: dict[str, str], status: int
) -> None:
    async with FakeEngine(replays(PLAIN)) as engine, started(engine.url) as bench:
        path = "/models" if method == "GET" else "/chat/completions"
        answer = await bench.client.request(method, path, json=CHAT if method == "POST" else None, headers=headers)
        assert answer.status_code == status
