"""What is fuzzed, a function each; every one says what must hold whatever comes in.

`tests/fuzz/test_fuzz.py` runs each for a moment, `make fuzz` for as long as one wants.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from capture.chat.assemble import Assembler, stream_of, without_ids
from capture.engines import NAMES, engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT, COMPLETIONS
from capture.errors import CaptureError, JsonError
from capture.journal.journal import JournalReader
from capture.journal.redact import redact
from capture.json import dumps, loads, loads_strict
from capture.record import TokenCapture
from capture.schemas import examples
from capture.sse import Event, EventDecoder
from proxy.dialects.anthropic.dialect import AnthropicDialect
from proxy.dialects.base import Dialect
from proxy.dialects.responses.dialect import ResponsesDialect
from proxy.errors import Refusal, UpstreamBroke, UpstreamTimeout
from proxy.http.decompress import DecompressError, zstd
from proxy.sessions.answer_cache import AnswerCache
from proxy.settings import Timeouts
from proxy.upstream.connection import Connection
from proxy.upstream.pool import HttpClient
from sandbox.containers.egress_proxy import BadRequest, read_request
from tests.fuzz.strange import STREAMS, VALUES, WHOLE, bent, changed, cuts
from tests.proxy.http.test_connection import REQUESTS as HTTP_REQUESTS
from tests.proxy.http.test_connection import replies
from tests.proxy.http.test_decompress import decompressed
from tests.proxy.raw import statuses
from tests.train.build import conversation, make_job
from train import stream_rollouts
from train.errors import TrainError
from train.rows.convert import ConvertOptions, convert
from train.tokens.coverage import coverage

#: A function by its name, and the strategies of its arguments.
TARGETS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}
#: Without the last, which explains: it takes longer than all of the others.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
GOLDEN = [line for _, line in examples()]
CUTS = st.lists(st.integers(0, 1 << 20), max_size=8)


def target(*strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(test: Callable[..., None]) -> Callable[..., None]:
        TARGETS[test.__name__] = test, strategies
        return test

    return add


def property_of(name: str, **options: Any) -> Any:
    """A Hypothesis test of a target; `options` are those of `hypothesis.settings`."""
    test, strategies = TARGETS[name]
    slow = list(HealthCheck)
    return settings(deadline=None, suppress_health_check=slow, phases=PHASES, **options)(given(*strategies)(test))


# the decoder


@target(changed(STREAMS), CUTS)
def sse(data: bytes, places: list[int]) -> None:
    """Cut anywhere, a stream has the same events; no byte of them is lost."""
    whole = decoded([data])
    assert decoded(cuts(data, places)) == whole
    raw = b"".join(event.raw for event in whole)
    assert data.startswith(raw) and not data[len(raw) :].strip(b"\r\n")


def decoded(pieces: list[bytes]) -> list[Event]:
    decoder = EventDecoder()
    events = [event for piece in pieces for event in decoder.feed(piece)]
    return events + decoder.flush()


# the engines' readers


REQUESTS: list[dict[str, Any]] = [
    {}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"tools": [{"type": "function", "function": {"name": "a"}}]},
    {"prompt": "a", "logprobs": 1}, {"prompt": ["a", "b"]}, {"prompt": "a", "echo": True}, {"return_token_ids": True},
    {"include_reasoning": False}, {"stream_options": {"include_usage": True}},
]  # fmt: skip


def reader_of(name: str, wire: str, body: dict[str, Any], stream: bool) -> Reader:
    request = {**body, "stream": True} if stream else body
    named_engine = engine(name)
    return Reader(named_engine, wire, request, named_engine.ask(wire, request, CaptureOptions(top_logprobs=1)))


@target(changed(STREAMS), CUTS, st.sampled_from(NAMES), st.sampled_from((CHAT, COMPLETIONS)), st.sampled_from(REQUESTS))
def reader_of_streams(data: bytes, places: list[int], name: str, wire: str, body: dict[str, Any]) -> None:
    """Nothing raises, what the agent gets is JSON where the engine's was, a complete record is one."""
    reader = reader_of(name, wire, body, stream=True)
    for event in decoded(cuts(data, places)):
        if event.data and event.data.strip() != b"[DONE]":
            out = reader.event(event.data)
            if out is not None and out is not event.data:
                for part in out.split(b"\n\ndata: "):
                    json.loads(part)
    reader.rest()
    recorded(reader)


@target(changed(WHOLE), st.sampled_from(NAMES), st.sampled_from((CHAT, COMPLETIONS)), st.sampled_from(REQUESTS))
def reader_of_answers(data: bytes, name: str, wire: str, body: dict[str, Any]) -> None:
    reader = reader_of(name, wire, body, stream=False)
    out = reader.body(data)
    if out is not data:
        json.loads(out)
    recorded(reader)


def recorded(reader: Reader) -> None:
    body = reader.assembled()
    redact(body)
    for chunk in stream_of(body, include_usage=True):
        json.dumps(chunk)
    for outcome in ("ok", "aborted", "truncated", "error"):
        capture = reader.capture(outcome, status=200)
        reread = TokenCapture.from_json(orjson.loads(dumps(capture.to_json())))  # as a journal's line is written
        assert reread.complete == capture.complete
        if capture.complete:
            assert outcome == "ok" and capture.prompt_token_ids is not None and capture.completions
            for completion in capture.completions:
                assert completion.token_ids is not None and completion.logprobs is not None
                assert len(completion.token_ids) == len(completion.logprobs) and all(
                    map(math.isfinite, completion.logprobs)
                )


# the assembler


TOOL = st.builds(
    lambda n, name, text: {"id": f"call-{n}", "type": "function", "function": {"name": name, "arguments": text}},
    st.integers(0, 99), st.text(min_size=1, max_size=5), st.text(max_size=8),
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.text(min_size=1, max_size=8)},
    optional={"reasoning": st.text(min_size=1, max_size=8), "refusal": st.text(min_size=1, max_size=8)},
) | st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none(),
     "tool_calls": st.lists(TOOL, min_size=1, max_size=3, unique_by=lambda tool: tool["id"])}
)  # fmt: skip


@target(st.lists(st.tuples(MESSAGE, st.sampled_from(("stop", "length", "tool_calls"))), min_size=1, max_size=3))
def assembler(choices: list[tuple[dict[str, Any], str]]) -> None:
    """A body that is streamed and put together again is the same body."""
    rows = [
        {"index": index, "message": message, "logprobs": None, "finish_reason": finish}
        for index, (message, finish) in enumerate(choices)
    ]
    body = {"id": "a", "object": "chat.completion", "created": 1, "model": "m", "choices": rows}
    body["usage"] = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assembled = Assembler()
    for chunk in stream_of(body, include_usage=True):
        assembled.add(json.loads(json.dumps(chunk)))
    assert assembled.body() == without_ids(body)


# the dialects


ASKED: dict[str, tuple[Dialect, list[Any]]] = {
    "messages": (
        AnthropicDialect(),
        [
            {"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stream": True, "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "b"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [
                    {"type": "text", "text": "r"}], "is_error": False}, {"type": "text", "text": "and?"}]}],
             "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
             "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "stop_sequences": ["x"],
             "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}, "temperature": 0.5},
            {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]},
        ],
    ),
    "responses": (
        ResponsesDialect(),
        [
            {"model": "m", "instructions": "s", "stream": True, "store": True, "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}],
                 "encrypted_content": "x"},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "r"},
                {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "p"},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"}],
             "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
                       {"type": "custom", "name": "apply_patch"}], "tool_choice": "auto",
             "parallel_tool_calls": True, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"},
             "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "max_output_tokens": 7},
            {"model": "m", "input": "a"}, {"model": "m", "input": "a", "previous_response_id": "resp_1"},
        ],
    ),
}  # fmt: skip


@target(st.sampled_from(sorted(ASKED)).flatmap(lambda name: st.tuples(st.just(name), bent(ASKED[name][1]))))
def requests_of_dialects(asked: tuple[str, Any]) -> None:
    """A request is chat that can be sent, or is refused with a sentence; it is never changed."""
    name, body = asked
    dialect = ASKED[name][0]
    if not isinstance(body, dict):
        return
    before = json.dumps(body)
    try:
        translated = dialect.translate(body, AnswerCache())
    except Refusal as refusal:
        assert 400 <= refusal.status < 500 and refusal.message
        status, payload = dialect.error(refusal.status, refusal.message)
        assert status >= 400 and json.loads(payload)
    else:
        json.dumps(translated.chat)
        assert isinstance(translated.chat.get("messages"), list) and all(
            isinstance(item, str) for item in translated.dropped
        )
        assert (translated.chat.get("stream") is True) == translated.streams
    assert json.dumps(body) == before


@target(st.sampled_from(sorted(ASKED)), changed(STREAMS), CUTS, st.sampled_from(NAMES))
def answers_of_dialects(name: str, data: bytes, places: list[int], engine_name: str) -> None:
    """Whatever chunks come, events go out that a client can read, and the record's body is JSON."""
    dialect, requests = ASKED[name]
    translated = dialect.translate(requests[1], AnswerCache())
    reply = dialect.reply(translated)
    reader = reader_of(engine_name, CHAT, translated.chat, stream=True)
    out = [reply.ping()]
    for event in decoded(cuts(data, places)):
        if event.data and event.data.strip() != b"[DONE]":
            chunk = reader.chunk(event.data)
            if chunk is not None:
                out.append(reply.feed(chunk))
    out.append(reply.finish() if reader.finished and reader.error is None else reply.error_event(500, "broke"))
    for event in decoded([b"".join(out)]):
        if event.data is not None:
            result = json.loads(event.data)
            assert event.complete and event.event is not None and result["type"] == event.event.decode()
    body = reply.body(reader.assembled())
    json.dumps(body)
    reply.cache_entries()


@target(st.sampled_from(sorted(ASKED)), bent([json.loads(data) for data in WHOLE.values()]))
def bodies_of_dialects(name: str, chat: Any) -> None:
    """An unstreamed answer of any shape becomes a body of the dialect's."""
    dialect, requests = ASKED[name]
    translated = dialect.translate(requests[1], AnswerCache())
    reader = reader_of("vllm", CHAT, translated.chat, stream=False)
    reader.body(json.dumps(chat).encode())
    whole = reader.assembled()
    if isinstance(whole, dict) and whole.get("choices"):
        reply = dialect.reply(translated)
        json.dumps(reply.body(whole))
        reply.cache_entries()
        reply = dialect.reply(translated)
        for chunk in stream_of(whole, include_usage=True):
            reply.feed(chunk)
        reply.finish()


# the files


LINES = b"".join(orjson.dumps(line) + b"\n" for line in GOLDEN)
ROOM = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path(tempfile.gettempdir())


def looked_at(call: Any) -> None:
    """Everything that anybody asks a call for."""
    with suppress(CaptureError):
        _ = (call.request_body, call.response_body, call.status_code, call.metadata, call.number, call.outcome)
        _ = (call.purpose, call.engine, call.offers_tools, call.duration_ms)
        capture = call.capture
        if capture is not None:
            assert isinstance(capture.complete, bool)
            for completion in capture.completions:
                list(completion.token_ids or ())


@target(changed({"journal": LINES}))
def journal(data: bytes) -> None:
    """A journal of any bytes is read to its end: calls, and a problem for each line that is none."""
    with tempfile.NamedTemporaryFile(dir=ROOM) as file:
        file.write(data)
        file.flush()
        reader = JournalReader(Path(file.name))
        calls = list(reader)
        for call in calls:
            looked_at(call)
    filled = sum(1 for line in data.split(b"\n") if line.strip())
    assert len(calls) + len(reader.problems) == filled
    whole = set(LINES.splitlines())
    whole_lines = [line for line in data.split(b"\n") if line in whole]
    assert len([call for call in calls if call.raw.rstrip(b"\n") in whole]) == len(whole_lines), (
        "an intact line is a call"
    )


@target(bent(GOLDEN))
def lines(line: Any) -> None:
    """A line of any shape is a call whose parts can be asked for, or no call."""
    with tempfile.NamedTemporaryFile(dir=ROOM) as file:
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        for call in JournalReader(Path(file.name)):
            looked_at(call)


FORMATS = ("skyrl-sft", "trl-sft", "trl-sft-ids", "trl-grpo", "prime-sft", "verl-sft")


def job_of(folder: Path) -> Path:
    calls = conversation(2)
    return make_job(folder / "job", [{"calls": calls}, {"calls": conversation(1, first=500), "reward": 0.0}])


def worked_through(job: Path, folder: Path) -> None:
    """The trainer's commands on a job, as functions; what they cannot use they say in a sentence."""
    with suppress(TrainError):
        for record in stream_rollouts(job, follow=False, group_size=2, on_withheld=json.dumps):
            json.dumps(record)
    with suppress(TrainError):
        for covered in coverage(job):
            json.dumps(covered.to_json())
    for name in FORMATS:
        with suppress(TrainError):
            convert(job, folder / f"{name}.jsonl", ConvertOptions(format=name))


@target(
    bent([conversation(2)]),
    st.sampled_from(("result.json", "config.json")),
    st.none() | VALUES,
    st.sampled_from(("reward", "rewards", "model", "task_name", "error", "timing", "finished_at", "agent_result")),
)
def jobs(calls: Any, name: str, value: Any, field: str) -> None:
    """A job whose journal and result hold anything is read, counted and converted, or refused with a sentence."""
    folder = Path(tempfile.mkdtemp(dir=ROOM))
    try:
        job = job_of(folder)
        rollout = sorted(path for path in job.iterdir() if path.is_dir())[0]
        rows = calls if isinstance(calls, list) else [calls]
        data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        (rollout / "trajectory/llm_trajectory.jsonl").write_bytes(data)
        result = json.loads((rollout / name).read_text())
        (rollout / name).write_text(json.dumps({**result, field: value}))
        worked_through(job, folder)
    finally:
        shutil.rmtree(folder)


# HTTP


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
SOME = STREAMS["chat-plain-length-stream"][:1500]
HTTP = {
    "chunked": HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nx-t: 1\r\n\r\n" % (len(SOME), SOME),
    "length": HEAD + b"content-length: %d\r\n\r\n%s" % (len(SOME), SOME),
    "close": HEAD + b"connection: close\r\n\r\n" + SOME,
    "interim": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    + HEAD
    + b"content-length: 0\r\n\r\n",
    "error": b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}",
    "gzip": HEAD + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\nabcd",
}


class Wire(asyncio.Transport):
    """A double of a transport: it takes what is written, and closes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def writelines(self, pieces: Any) -> None:
        pass

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@target(changed(HTTP), CUTS, st.booleans())
def answers_over_http(data: bytes, places: list[int], resets: bool) -> None:
    """Bytes that should be an answer end as one, or as an error that says so; nothing waits for ever."""

    async def run() -> None:
        wire, connection = Wire(), Connection(HttpClient("http://127.0.0.1:1", Timeouts(1, 1, 1)))
        connection.connection_made(wire)
        exchange = asyncio.ensure_future(connection.exchange([b"x"], Timeouts(1, 1, 1)))
        await asyncio.sleep(0)
        for piece in cuts(data, places):
            if not wire.closed:
                connection.data_received(piece)
        connection.connection_lost(ConnectionResetError() if resets else None)
        try:
            await exchange
            body = await connection.read()
            assert 200 <= connection.status < 1000 and isinstance(body, bytes)
        except (UpstreamBroke, UpstreamTimeout):
            pass
        finally:
            connection.close()

    asyncio.run(run())


@target(changed({str(number): data for number, data in enumerate(HTTP_REQUESTS)}), CUTS)
def requests_over_http(data: bytes, places: list[int]) -> None:
    """Bytes that should be requests are answered, refused with a status, or waited for; nothing fails."""
    written, _ = asyncio.run(replies(cuts(data, places)))
    assert set(statuses(written)) <= {100, 200, 400, 417, 431, 501, 505}
    assert written[:9] in (b"", b"HTTP/1.1 ")


COMPRESSED = {
    "gzip": gzip.compress(b"abc" * 200), "deflate": zlib.compress(b"abc" * 200), "zstd": zstd.compress(b"abc" * 200),
}  # fmt: skip


@target(changed(COMPRESSED), CUTS, st.sampled_from(sorted(COMPRESSED)))
def compressed_bodies(data: bytes, places: list[int], coding: str) -> None:
    """A compressed body gives the same bytes wherever it is cut, in bounded pieces, or is refused."""
    try:
        whole = decompressed(coding, [data])
    except DecompressError:
        return
    assert decompressed(coding, cuts(data, places)) == whole


@target(changed({"request": orjson.dumps(ASKED["messages"][1][0])}))
def request_bodies(data: bytes) -> None:
    """A body is parsed, or is none; what is kept of it can be written as one line."""
    try:
        value = loads(data)
    except JsonError:
        return
    try:
        assert loads_strict(data) == value
    except JsonError:
        return
    if isinstance(value, dict):
        assert json.loads(orjson.dumps(redact(value))) is not None


# the way out of a sandbox


EGRESS_PARTS = [
    b"GET ", b"CONNECT ", b"http://", b"allowed.example", b":80", b"/path?q", b" HTTP/1.1", b"\r\n", b"\n", b"\r",
    b"Host: other.example", b"Connection: keep-alive", b"Connection : keep-alive", b" folded", b"\tfolded",
    b"Proxy-Authorization: Basic c2FuZGJveDpwYXNz", b"Content-Length: 5", b"Transfer-Encoding: chunked", b"user@",
    b"[::1]", b"%0d%0a", b"\x00", b"\xff", b"X: y", b"#", b"\\",
]  # fmt: skip


@target(st.lists(st.sampled_from(EGRESS_PARTS) | st.binary(max_size=3), max_size=14).map(b"".join))
def egress_requests(head: bytes) -> None:
    """A request is refused, or forwarded as one to the host that was checked, without the sandbox's password."""
    try:
        request = read_request(head)
    except BadRequest:
        return
    if request.forwarded is None:
        return
    lines = request.forwarded.split(b"\r\n")
    assert (
        lines[-2:] == [b"", b""] and b"" not in lines[:-2] and not any(b"\n" in line or b"\r" in line for line in lines)
    )
    names = [line.partition(b":")[0].lower() for line in lines[1:-2]]
    assert all(name and name == name.strip() for name in names)
    host = f"[{request.host}]" if ":" in request.host else request.host
    port = "" if request.port == 80 else f":{request.port}"
    assert [line for line in lines if line.lower().startswith(b"host:")] == [f"Host: {host}{port}".encode()]
    assert names.count(b"connection") == 1 and b"Connection: close" in lines
    assert b"proxy-authorization" not in names
