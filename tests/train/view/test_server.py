"""The server of the page: its policy for scripts, the names it answers to, its answers to bad questions."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.train.build import broken, make_job
from tests.train.view.view_job import view_of
from train.view.server import make_app


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    view = view_of(make_job(tmp_path / "job", [{"calls": broken(2)}]))
    return TestClient(make_app(view), base_url="http://127.0.0.1:1234")


def test_the_page_lets_in_no_other_script_and_nobody_frame_it(client: TestClient) -> None:
    for path in ("/", "/static/app.js", "/static/vendor/preact.mjs", "/style.css", "/api/job"):
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    document_text = client.get("/").text
    assert "<script>" not in document_text and "style=" not in document_text


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""])
def test_a_rebound_dns_name_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/api/job", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:1", "[::1]:1", "192.168.1.4"])
def test_an_address_of_this_machine_is_answered(client: TestClient, host: str) -> None:
    assert client.get("/api/job", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ("rollout?path=nowhere", 404),
        ("rollout?path=../../etc", 404),
        ("nothing", 404),
        ("call?path=write-number__00000001&call=99", 400),
        ("call?path=write-number__00000001&call=x", 400),
        ("slice?path=write-number__00000001&of=s0", 400),
        ("strip?path=write-number__00000001&of=s99", 400),
        ("strip?path=write-number__00000001&of=%3Cscript%3E", 400),
        ("slice?path=write-number__00000001&of=s0&from=999999", 200),
    ],
)
def test_an_invalid_request_is_answered_with_a_sentence(client: TestClient, question: str, status: int) -> None:
    answer = client.get(f"/api/{question}")
    assert answer.status_code == status
    assert status == 200 or len(answer.json()["error"]) > 10


def test_without_a_browser_the_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from train.view import server

    messages: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", lambda _: False)
    server.open_page("http://127.0.0.1:1/", messages.append)
    assert messages == [
        "no browser could be opened here: open http://127.0.0.1:1/ yourself, or use --html FILE or --text"
    ]
