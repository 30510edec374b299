"""What is fed in: real recordings with their bytes changed, valid objects with parts of them replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

TRANSCRIPTS = Path(__file__).parents[1] / "capture" / "transcripts"
#: Answers of chat and of completions calls, as vLLM and SGLang sent them.
STREAMS = {p.stem: p.read_bytes() for p in sorted(TRANSCRIPTS.rglob("*.body")) if p.read_bytes()[:5] == b"data:"}
WHOLE = {p.stem: p.read_bytes() for p in sorted(TRANSCRIPTS.rglob("*.body")) if p.read_bytes()[:1] == b"{"}

#: Pieces that mean something to one of the readers.
TOKENS = (
    b"\n", b"\r", b"\r\n", b"\n\n", b"data: ", b"data:", b"event: x\n", b": c\n", b"[DONE]", b"{", b"}", b"[", b"]",
    b",", b'"', b"\\", b"\\u0000", b"\\ud800", b"\x00", b"\xff", b"\xef\xbb\xbf", b"null", b"true", b"NaN", b"-0",
    b"1e999", b"9" * 25, b"-1", b"0.5", b"{}", b"[]", b'""', b'"error":', b'"choices":', b'"index":1,', b'"token_ids":',
    b'"prompt_token_ids":', b'"logprobs":', b'"usage":null,', b'"finish_reason":"stop",', b'"tool_calls":', b'"delta":',
    b'"content":', b'"metadata":', b'"token_capture":', b'"completions":', b'"\\u0000cut"', b'"call":7,', b"token_id:",
)  # fmt: skip

_EDIT = st.tuples(
    st.sampled_from(("insert", "replace", "delete", "double", "swap")),
    st.integers(0, 1 << 20),
    st.integers(0, 64) | st.integers(0, 1 << 20),
    st.sampled_from(TOKENS) | st.binary(max_size=4),
)


@st.composite
def changed(draw: st.DrawFn, originals: dict[str, bytes], most: int = 6) -> bytes:
    """One of `originals` after up to `most` edits."""
    data = originals[draw(st.sampled_from(sorted(originals)))]
    for what, at, length, piece in draw(st.lists(_EDIT, max_size=most)):
        data = edited(data, what, at, length, piece)
    return data


def edited(data: bytes, what: str, at: int, length: int, piece: bytes) -> bytes:
    at %= len(data) + 1
    end = at + length % (len(data) - at + 1)
    if what == "insert":
        return data[:at] + piece + data[at:]
    if what == "replace":
        return data[:at] + piece + data[at + len(piece) :]
    if what == "delete":
        return data[:at] + data[end:]
    if what == "double":
        return data[:end] + data[at:]
    return data[end:] + data[:end]


def cuts(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces, cut at `places` (any numbers)."""
    offsets = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *offsets], offsets, strict=False)]


#: Any JSON value, small.
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | st.text(max_size=6)
    | st.sampled_from(["", "stop", "user", "assistant", "tool", "text", "function", "auto", "token_id:7", "x" * 300]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(("type", "role", "content", "text", "name", "id", "input")), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@st.composite
def bent(draw: st.DrawFn, originals: list[Any], most: int = 3) -> Any:
    """A deep copy of one of `originals` with up to `most` of its parts replaced, left out, or put beside others."""
    value = json.loads(json.dumps(draw(st.sampled_from(originals))))
    for _ in range(draw(st.integers(0, most))):
        places = list(_places(value))
        if not places:
            break
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        how = draw(st.sampled_from(("replace", "remove", "double", "move")))
        if how == "replace":
            holder[key] = draw(VALUES)
        elif how == "remove":
            del holder[key]
        elif how == "double" and isinstance(holder, list):
            holder.insert(key, json.loads(json.dumps(holder[key])))
        else:
            other, name = places[draw(st.integers(0, len(places) - 1))]
            moved = json.loads(json.dumps(holder[key]))
            if isinstance(other, dict) or name < len(other):
                other[name] = moved
    return value


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)
