"""`GET /sessions/ID/records`: a session's journal over the admin port, for those who cannot read the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy import Settings, serve
from proxy.admin.records import PIECE, records
from proxy.errors import NoSuchSession
from tests.proxy.fake_engine import FakeEngine, replays

CHAT: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "Name two colours."}]}
PLAIN = "vllm/chat-plain-length-nostream"


async def read(journal: Path, skip: int = 0) -> bytes:
    return b"".join([piece async for piece in await records(journal, skip)])


LONG = b"x" * (PIECE - 1) + b"\n"


@pytest.mark.parametrize(
    ("written", "skip", "given"),
    [
        (b"", 0, b""),
        (b"torn", 0, b""),
        (b"a\nb\n", 0, b"a\nb\n"),
        (b"a\nb\ntor", 0, b"a\nb\n"),
        (b"a\nb\ntor", 1, b"b\n"),
        (b"a\nb\n", 2, b""),
        (b"a\nb\n", 5, b""),
        (LONG + b"b\n" + b"torn" * PIECE, 1, b"b\n"),
        (LONG + LONG + b"c\n", 2, b"c\n"),
        (b"y" * (3 * PIECE) + b"\nb\n", 0, b"y" * (3 * PIECE) + b"\nb\n"),
        (b"y" * (3 * PIECE) + b"\nb\n", 1, b"b\n"),
    ],
)
async def test_whole_lines_are_given_from_the_one_that_was_asked_for_on(
    tmp_path: Path, written: bytes, skip: int, given: bytes
) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(written)
    assert await read(journal, skip) == given


async def test_a_journal_in_pieces_of_bounded_size(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes((b"z" * 999 + b"\n") * 5000)
    pieces = [len(piece) async for piece in await records(journal, 1)]
    assert sum(pieces) == 4_999_000 and max(pieces) <= PIECE
    with pytest.raises(NoSuchSession, match="No such file"):
        await records(tmp_path / "gone.jsonl", 0)


async def test_the_records_of_an_open_and_of_an_ended_session(tmp_path: Path) -> None:
    settings = Settings(probe=False, admin_port=0, admin_key="admin")
    async with FakeEngine(replays(PLAIN)) as engine, serve(settings) as proxy:
        journal = tmp_path / "one.jsonl"
        session = await proxy.open_session("one", journal=journal, upstream=[engine.url])
        headers = {"authorization": "Bearer admin"}
        async with httpx.AsyncClient(base_url=proxy.admin_url or "", headers=headers) as admin:

            async def call() -> None:
                key = {"authorization": f"Bearer {session.api_key}"}
                assert (await admin.post(f"{proxy.base_url}/chat/completions", json=CHAT, headers=key)).is_success

            async def numbers(query: str = "") -> list[int]:
                answer = await admin.get(f"/sessions/{session.id}/records{query}")
                assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson"
                return [json.loads(line)["metadata"]["call"] for line in answer.text.splitlines()]

            assert await numbers() == []
            for _ in range(3):
                await call()
            assert await numbers() == [0, 1, 2] and await numbers("?from=2") == [2] and await numbers("?from=9") == []
            assert (await admin.get("/sessions/one/records")).content == journal.read_bytes()
            await admin.delete(f"/sessions/{session.id}")
            assert await numbers("?from=1") == [1, 2], "after its end too"
            for query in ("?from=-1", "?from=x", "?from=1e3"):
                odd = await admin.get(f"/sessions/{session.id}/records{query}")
                assert odd.status_code == 400 and "?from=12" in odd.json()["error"]["message"]
            assert (await admin.get("/sessions/nobody/records")).status_code == 404
            wrong = await admin.get(
                f"/sessions/{session.id}/records", headers={"authorization": f"Bearer {session.api_key}"}
            )
            assert wrong.status_code == 401
            journal.unlink()
            gone = await admin.get(f"/sessions/{session.id}/records")
            assert gone.status_code == 404 and "No such file" in gone.json()["error"]["message"]
