"""Every recorded answer of a real engine, fed in pieces of every size: ids, logprobs, counts, what the agent gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from capture.engines import engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT, COMPLETIONS
from capture.sse import EventDecoder

TRANSCRIPTS = Path(__file__).parents[1] / "transcripts"
SIZES = [1, 7, 64, 1 << 30]
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}
#: What we add to a call; an agent that asks for none of it is who these replays play.
OURS = ("logprobs", "top_logprobs", "return_token_ids", "stream_options", "return_input_ids_in_sglext",
        "return_output_ids_in_sglext")  # fmt: skip
#: Answers that are not all there, with the code for each field; every other one is complete.
INCOMPLETE = {
    "vllm/chat-abort-midstream": {"completion_token_ids": "stream_aborted", "logprobs": "stream_aborted"},
    "vllm/reasoning-hidden-nostream": {
        "completion_token_ids": "hidden_by_include_reasoning",
        "logprobs": "hidden_by_include_reasoning",
    },
    # Asked with return_tokens_as_token_ids alone: sampled ids come as text, the prompt's do not come.
    "vllm/chat-tokid-nostream": {"prompt_token_ids": "no_prompt_ids"},
    "vllm/chat-tokid-stream": {"prompt_token_ids": "no_prompt_ids"},
}


def recorded() -> Iterator[str]:
    for path in sorted(TRANSCRIPTS.glob("*/*.json")):
        result = json.loads(path.read_text())
        if result["path"] in ROUTES and result["response"]["status"] == 200:
            yield f"{path.parent.name}/{path.stem}"


NAMES = list(recorded())


class Replay:
    """One recorded call, played to a reader as the proxy would: the agent asked for nothing of ours."""

    def __init__(self, name: str, size: int = 1 << 30, *, agent_asks: bool = False) -> None:
        self.transcript = json.loads((TRANSCRIPTS / f"{name}.json").read_text())
        self.data = (TRANSCRIPTS / f"{name}.body").read_bytes()
        self.engine = engine(name.split("/")[0])
        self.wire = ROUTES[self.transcript["path"]]
        body = self.transcript["body"]
        self.body = body if agent_asks else {k: v for k, v in body.items() if k not in OURS}
        self.streamed = bool(body.get("stream"))
        ask = self.engine.ask(self.wire, self.body, CaptureOptions())
        if agent_asks:  # somebody asked; the reader must still find everything
            ask.injected = ask.injected or ("logprobs",)
        self.reader: Reader = Reader(self.engine, self.wire, self.body, ask)
        self.agent: list[Any] = []
        self.outcome = "ok"
        self._play(size)

    def _play(self, size: int) -> None:
        if not self.streamed:
            self.agent.append(json.loads(self.reader.body(self.data)))
            return
        decoder = EventDecoder()
        events = []
        for start in range(0, len(self.data), size):
            events += decoder.feed(self.data[start : start + size])
        assert b"".join(event.raw for event in events) == self.data[: sum(len(e.raw) for e in events)]
        for event in events:
            if event.data and event.data != b"[DONE]":
                forwarded = self.reader.event(event.data)
                if forwarded is not None:
                    self.agent.append(json.loads(forwarded))
        if self.transcript["response"]["aborted_by_client"]:
            self.outcome = "aborted"

    def parts(self) -> list[Any]:
        """The engine's chunks, or its one body."""
        if not self.streamed:
            return [json.loads(self.data)]
        return [json.loads(line[6:]) for line in self.data.decode().splitlines() if line.startswith("data: {")]

    def truth(self) -> tuple[Any, dict[int, list[int]], dict[int, list[float]]]:
        """Prompt ids, and ids and logprobs by choice, read from the bytes by other means than the code under test."""
        prompt: Any = None
        ids: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        for part in self.parts():
            ext = part.get("sglext") or {}
            prompt = prompt or part.get("prompt_token_ids") or ext.get("input_ids")
            for index, output in enumerate(ext.get("output_ids") or []):
                ids.setdefault(index, []).extend(output)
            for choice in part["choices"]:
                index = choice["index"]
                prompt = prompt or choice.get("prompt_token_ids")
                ids.setdefault(index, []).extend(choice.get("token_ids") or choice.get("response_token_ids") or [])
                result = choice.get("logprobs") or {}
                entries = result.get("content") or []
                values = [e["logprob"] for e in entries] or result.get("token_logprobs") or []
                ids[index] += [int(e["token"][9:]) for e in entries if e["token"].startswith("token_id:")]
                logprobs.setdefault(index, []).extend(values)
        return prompt, ids, logprobs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_ids_logprobs_and_counts_are_the_engines_own(name: str, size: int) -> None:
    replay = Replay(name, size)
    capture = replay.reader.capture(replay.outcome, status=200)
    assert {field: why.code for field, why in capture.unavailable.items()} == INCOMPLETE.get(name, {})
    assert capture.complete is (name not in INCOMPLETE) and bool(capture.digest) is capture.complete
    prompt, ids, logprobs = replay.truth()
    assert (capture.prompt_token_ids or None) == (prompt or None)
    assert {c.index: list(c.token_ids or ()) for c in capture.completions} == ids
    assert {c.index: c.logprobs or [] for c in capture.completions} == logprobs
    assert all(len(c.tokens or []) == len(c.logprobs or []) for c in capture.completions)


@pytest.mark.parametrize(
    "path", sorted(TRANSCRIPTS.glob("*/*.body")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_every_recorded_stream_is_the_same_events_at_every_size(path: Path) -> None:
    """Also those of routes that no reader knows yet: Anthropic messages, responses, the engines' own."""
    data = path.read_bytes()
    decoded = []
    for size in SIZES:
        decoder = EventDecoder()
        events = [event for at in range(0, len(data), size) for event in decoder.feed(data[at : at + size])]
        events += decoder.flush()
        assert b"".join(event.raw for event in events) == data
        decoded.append([(event.event, event.data) for event in events])
    assert all(events == decoded[0] for events in decoded)
    if path.stem.endswith("stream") and not path.stem.endswith("nostream"):
        assert all(json.loads(data) for _, data in decoded[0] if data and data != b"[DONE]")


@pytest.mark.parametrize("name", NAMES)
def test_the_agent_gets_nothing_it_did_not_ask_for(name: str) -> None:
    replay = Replay(name)
    for body in replay.agent:
        assert body.get("prompt_token_ids") is None
        # SGLang tells of speculation unasked where n is above 1 (0.5.23): that is the agent's.
        assert not {"input_ids", "output_ids"} & set(body.get("sglext", {}))
        assert body.get("sglext") != {}
        if replay.streamed:
            assert body["choices"], "the usage chunk is ours"
        for choice in body["choices"]:
            for key in ("token_ids", "prompt_token_ids", "response_token_ids", "logprobs"):
                assert choice.get(key) is None
            if replay.streamed and replay.wire == CHAT and choice["finish_reason"] is None:
                assert any(value is not None for value in choice["delta"].values()), "a chunk that is ours alone"
    raw = [shape(part, replay.engine.name) for part in replay.parts()]
    assert all(shape(body, replay.engine.name) in raw for body in replay.agent), (
        "keys that the engine sends stay, null or not"
    )
    text = json.dumps(replay.agent)
    assert replay.outcome == "aborted" or '"finish_reason"' in text


@pytest.mark.parametrize("name", [name for name in NAMES if "abort" not in name])
def test_an_agent_that_asks_for_everything_gets_the_engines_bytes(name: str) -> None:
    replay = Replay(name, agent_asks=True)
    asked = replay.transcript["body"]
    wants_all = (asked.get("logprobs") not in (None, False)) and (
        asked.get("return_token_ids") or asked.get("return_input_ids_in_sglext")
    )
    if not wants_all or (replay.streamed and not (asked.get("stream_options") or {}).get("include_usage")):
        pytest.skip("this call did not ask for everything")
    assert replay.agent == replay.parts()


#: What SGLang (0.5.23) sends only where it was asked: taken away. vLLM's stay as null, as in a plain answer.
GONE: dict[str, set[str]] = {"sglang": {"prompt_token_ids", "response_token_ids", "token_ids", "sglext"}, "vllm": set()}


def shape(body: dict[str, Any], name: str) -> list[Any]:
    """The keys of a body and of its choices, less what is taken away for an agent that did not ask."""
    gone = GONE[name] | {"usage", "system_fingerprint"}
    return [
        sorted(set(body) - gone),
        [[sorted(set(choice) - gone), sorted(choice.get("delta") or ())] for choice in body["choices"]],
    ]


#: A stream and its unstreamed twin.
TWINS = [name for name in NAMES if name.endswith("-stream") and name.replace("-stream", "-nostream") in NAMES]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", TWINS)
def test_a_stream_assembles_to_the_body_that_came_unstreamed(name: str, size: int) -> None:
    streamed = Replay(name, size).reader.assembled()
    whole = Replay(name.replace("-stream", "-nostream")).reader.assembled()
    if cut_tool_call(streamed):
        # The engines' own difference: a tool call cut by max_tokens is text in the answer that comes whole.
        assert whole["choices"][0]["finish_reason"] == streamed["choices"][0]["finish_reason"]
        return
    assert comparable(streamed) == comparable(whole)


def cut_tool_call(body: dict[str, Any]) -> bool:
    return any(
        choice.get("finish_reason") == "length" and (choice.get("message") or {}).get("tool_calls")
        for choice in body["choices"]
    )


def comparable(value: Any) -> Any:
    """A body without nulls and without what differs between any two calls."""
    if isinstance(value, dict):
        skipped = ("id", "created", "metadata", "reasoning_tokens")
        return {
            k: comparable(v) for k, v in value.items() if v is not None and k not in skipped and comparable(v) != {}
        }
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return value
