"""The decoder of Server-Sent Events: any line end, any cut, any size, in linear time."""

from __future__ import annotations

import itertools
import re
import time

from hypothesis import given
from hypothesis import strategies as st

from capture.sse import Event, EventDecoder
from tests.examples import examples


def decode(data: bytes, size: int = 1 << 30) -> list[Event]:
    decoder = EventDecoder()
    events: list[Event] = []
    for start in range(0, len(data), size):
        events += decoder.feed(data[start : start + size])
    return events + decoder.flush()


def payloads(data: bytes, size: int = 1 << 30) -> list[bytes]:
    return [event.data for event in decode(data, size) if event.data is not None]


def test_a_space_after_data_is_optional_and_only_one_is_taken() -> None:
    assert payloads(b"data:a\n\ndata: b\n\ndata:  c\n\n") == [b"a", b"b", b" c"]


def test_data_lines_are_joined_by_newlines() -> None:
    assert payloads(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_crlf_and_lone_cr_end_lines_even_when_split() -> None:
    for end in (b"\r\n", b"\r", b"\n"):
        data = b"data: a" + end + b"data: b" + end + end + b"data: c" + end + end
        for size in (1, 2, 3, 1000):
            assert payloads(data + b": end" + end + end, size) == [b"a\nb", b"c"]


def test_comments_and_comments_that_look_like_the_end_carry_no_data() -> None:
    events = decode(b": keep-alive\n\n: data: [DONE]\n\ndata: x\n\n")
    assert [event.data for event in events] == [None, None, b"x"]
    assert [event.raw for event in events[:2]] == [b": keep-alive\n\n", b": data: [DONE]\n\n"]


def test_an_event_keeps_its_name_and_its_bytes() -> None:
    (event,) = decode(b"event: sglext_ids\nid: 4\ndata: {}\n\n")
    assert (event.event, event.data, event.raw) == (b"sglext_ids", b"{}", b"event: sglext_ids\nid: 4\ndata: {}\n\n")


def test_a_byte_order_mark_is_ignored() -> None:
    assert payloads(b"\xef\xbb\xbfdata: a\n\n", 1) == [b"a"]


def test_a_stream_that_ends_too_early_leaves_an_incomplete_event() -> None:
    events = decode(b'data: a\n\ndata: {"half')
    assert [(event.data, event.complete) for event in events] == [(b"a", True), (b'{"half', False)]


def test_a_stream_of_lone_crs_ends_with_a_whole_event() -> None:
    events = decode(b"data: a\r\rdata: b\r\r", 1)
    assert [(event.data, event.complete) for event in events] == [(b"a", True), (b"b", True)]


def test_an_event_of_eight_mebibytes_in_small_pieces_is_linear() -> None:
    data = b"data: " + b"1," * (4 << 20) + b"\n\n"
    began = time.thread_time()
    (event,) = decode(data, 4096)
    assert event.data is not None and len(event.data) == 8 << 20
    assert time.thread_time() - began < 5, "2,048 pieces that each search all that is held would take minutes"


LINE = st.sampled_from([b"data: a", b"data:b", b"data", b": c", b"event: e", b'data: {"x": "\\n"}', b"id: 1"])
END = st.sampled_from([b"\n", b"\r\n", b"\r"])


@examples(300)
@given(
    blocks=st.lists(st.lists(st.tuples(LINE, END), min_size=1, max_size=4), max_size=5),
    end=END,
    cuts=st.lists(st.integers(0, 400), max_size=20),
    only_lf=st.booleans(),
)
def test_any_stream_cut_anywhere_means_what_its_lines_say(
    blocks: list[list[tuple[bytes, bytes]]], end: bytes, cuts: list[int], only_lf: bool
) -> None:
    data = b"".join(b"".join(line + stop for line, stop in block) + end for block in blocks)
    if only_lf:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    # A bare CR before a LF of the next piece is one line end; the oracle reads the bytes as they stand.
    lines = re.split(b"\n", data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    wanted: list[bytes] = []
    expected: list[bytes] = []
    for line in lines:
        if not line:
            if expected:
                wanted.append(b"\n".join(expected))
            expected = []
        elif line.partition(b":")[0] == b"data":
            expected.append(line.partition(b":")[2].removeprefix(b" "))
    decoder = EventDecoder()
    events: list[Event] = []
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, stop in itertools.pairwise(places):
        events += decoder.feed(data[start:stop])
    left = decoder.flush()
    assert b"".join(event.raw for event in [*events, *left]) == data or not left
    assert [event.data for event in [*events, *left] if event.data is not None] == wanted + (
        [b"\n".join(expected)] if expected else []
    )
