"""A call that carries its own script: its dialect, what the engine does to it, and what must be seen of it.

The call carries its own name in the text of its prompt, `[s17.4 cut 12]`, which every dialect passes on. The
engine reads there what to do, and the comparison finds it in the engine's ledger, the client's report and the journal.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_NAMED = re.compile(rb"\[([a-z0-9]+\.\d+) ([a-z]+) (\d+)\]")


@dataclass(frozen=True, slots=True)
class Seen:
    """What must be seen of a call of some kind: by its client, in its journal line.

    `client`: answered, status, cut (the connection ended too early), failed (an error came as an event), left, unsent.
    `ids`: all, sampled (as many as the engine sent before it stopped), some (at most those), none.
    """

    client: str
    status: int
    outcome: str | None
    ids: str


@dataclass(frozen=True, slots=True)
class Kind:
    """Something that happens to calls, as often as `weight` says. None: it does not happen in that form."""

    weight: int
    streamed: Seen | None
    whole: Seen | None


_ANSWERED = Seen("answered", 200, "ok", "all")
_NO_ANSWER = Seen("status", 502, "error", "none")

KINDS: dict[str, Kind] = {
    "plain": Kind(600, _ANSWERED, _ANSWERED),
    "trickle": Kind(15, _ANSWERED, _ANSWERED),  # one byte at a time
    "huge": Kind(1, _ANSWERED, None),  # one event of 8 MiB
    "garbled": Kind(20, _ANSWERED, None),  # one event among the others is no JSON
    "busy": Kind(20, Seen("status", 429, "error", "none"), Seen("status", 429, "error", "none")),
    "broken": Kind(20, Seen("status", 500, "error", "none"), Seen("status", 500, "error", "none")),
    "overloaded": Kind(20, Seen("status", 503, "error", "none"), Seen("status", 503, "error", "none")),
    "cut": Kind(30, Seen("cut", 200, "truncated", "sampled"), _NO_ANSWER),  # closes in the middle
    "reset": Kind(20, Seen("cut", 200, "truncated", "some"), _NO_ANSWER),  # the same with a reset
    "refused": Kind(20, _NO_ANSWER, _NO_ANSWER),  # a reset before the first byte
    "noise": Kind(20, _NO_ANSWER, _NO_ANSWER),  # what comes is no HTTP
    "fails": Kind(20, Seen("failed", 200, "truncated", "sampled"), None),  # an error as an event in mid-stream
    "stall": Kind(6, Seen("failed", 200, "truncated", "sampled"), None),  # goes silent
    "mute": Kind(3, Seen("status", 504, "error", "none"), Seen("status", 504, "error", "none")),  # never begins
    "leaves": Kind(60, Seen("left", 200, "aborted", "sampled"), Seen("left", 0, "aborted", "none")),
    "unsent": Kind(20, Seen("unsent", 0, None, "none"), Seen("unsent", 0, None, "none")),  # leaves in mid-request
}


@dataclass(frozen=True, slots=True)
class Call:
    """`name` is `SESSION.NUMBER`; `tokens` how many the engine would sample."""

    name: str
    dialect: str
    kind: str
    streams: bool
    tokens: int

    @property
    def text(self) -> str:
        return f"[{self.name} {self.kind} {self.tokens}] Continue."

    @property
    def seen(self) -> Seen:
        kind = KINDS[self.kind]
        seen = kind.streamed if self.streams else kind.whole
        assert seen is not None
        return seen


def named(text: bytes) -> tuple[str, str, int] | None:
    """The name, kind and tokens of the call whose text is in `text`."""
    found = _NAMED.search(text)
    return None if found is None else (found[1].decode(), found[2].decode(), int(found[3]))


def prompt_ids(name: str) -> list[int]:
    dice = random.Random(f"prompt {name}")
    return [dice.randrange(49_152) for _ in range(8 + dice.randrange(200))]


def sampled_ids(name: str, tokens: int) -> list[int]:
    dice = random.Random(f"sampled {name}")
    return [dice.randrange(49_152) for _ in range(tokens)]


def word(token_id: int) -> str:
    """The text of a token."""
    return f" t{token_id}"


def logprob(token_id: int) -> float:
    return -token_id / 4096


@dataclass(frozen=True, slots=True)
class Dialect:
    """How agents speak one API: where to, how to ask, and what an answer says."""

    path: str
    key_header: str
    ask: Callable[[Call], dict[str, Any]]
    #: The text of a whole answer's JSON, or of one event's.
    whole_text: Callable[[Any], str]
    event_text: Callable[[Any], str]
    #: What only the end of a complete stream has in it.
    end: bytes
    #: The status an agent sees for one of the engine's, where the dialect has its own.
    statuses: dict[int, int]
    #: What an agent sees of a stream that the engine cut: the cut, or an error of the dialect's.
    cut: str = "cut"


def _chat(call: Call) -> dict[str, Any]:
    return {"model": "my-policy", "messages": [{"role": "user", "content": call.text}], "stream": call.streams}


def _completions(call: Call) -> dict[str, Any]:
    return {"model": "my-policy", "prompt": call.text, "stream": call.streams, "max_tokens": call.tokens}


def _messages(call: Call) -> dict[str, Any]:
    messages = [{"role": "user", "content": call.text}]
    return {"model": "my-policy", "messages": messages, "stream": call.streams, "max_tokens": call.tokens}


def _responses(call: Call) -> dict[str, Any]:
    return {"model": "my-policy", "input": call.text, "stream": call.streams, "max_output_tokens": call.tokens}


DIALECTS: dict[str, Dialect] = {
    "openai-chat": Dialect(
        path="/v1/chat/completions",
        key_header="authorization: Bearer",
        ask=_chat,
        whole_text=lambda body: body["choices"][0]["message"]["content"],
        event_text=lambda chunk: "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ())),
        end=b"data: [DONE]\n\n",
        statuses={},
    ),
    "anthropic-messages": Dialect(
        path="/v1/messages",
        key_header="x-api-key:",
        ask=_messages,
        whole_text=lambda body: "".join(block["text"] for block in body["content"]),
        event_text=lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
        end=b"event: message_stop\n",
        statuses={503: 529},
        cut="failed",
    ),
    "openai-responses": Dialect(
        path="/v1/responses",
        key_header="authorization: Bearer",
        ask=_responses,
        whole_text=lambda body: "".join(part["text"] for item in body["output"] for part in item["content"]),
        event_text=lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        end=b"event: response.completed\n",
        statuses={},
        cut="failed",
    ),
    "openai-completions": Dialect(
        path="/v1/completions",
        key_header="authorization: Bearer",
        ask=_completions,
        whole_text=lambda body: body["choices"][0]["text"],
        event_text=lambda chunk: "".join(choice["text"] for choice in chunk.get("choices", ())),
        end=b"data: [DONE]\n\n",
        statuses={},
    ),
}


def stream_text(dialect: Dialect, data: bytes) -> tuple[str, bool]:
    """The text of a stream's events so far, and whether one of them was an error."""
    text, failed = [], False
    for block in data.split(b"\n\n"):
        for line in block.split(b"\n"):
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            try:
                event = json.loads(line[6:])
            except ValueError:
                continue  # a garbled one, passed on as it is
            if event.get("error") is not None or event.get("type") in ("error", "response.failed"):
                failed = True
            else:
                text.append(dialect.event_text(event))
    return "".join(text), failed


def drawn(dice: random.Random, session: str, number: int) -> Call:
    """A call by chance, as often as its kind's weight says."""
    kind = dice.choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]
    streams = dice.choice(forms(kind))
    return Call(f"{session}.{number}", dice.choice(list(DIALECTS)), kind, streams, dice.randint(2, 24))


def every(dice: random.Random, session: str, dialect: str, streams: bool) -> list[Call]:
    """One call of every kind there is in this form, in any order."""
    kinds = [kind for kind in KINDS if streams in forms(kind)]
    dice.shuffle(kinds)
    return [Call(f"{session}.{n}", dialect, kind, streams, dice.randint(2, 24)) for n, kind in enumerate(kinds)]


def forms(kind: str) -> list[bool]:
    """Whether a kind happens to streamed calls (True), to whole ones (False)."""
    return [streams for streams, seen in ((True, KINDS[kind].streamed), (False, KINDS[kind].whole)) if seen is not None]
