"""Whatever an engine answers, nothing raises, the agent gets JSON, and complete is never claimed for what is not."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.chat.assemble import stream_of
from capture.engines import NAMES, engine
from capture.engines.reader import Reader
from capture.engines.request import CaptureOptions
from capture.engines.wires import CHAT, COMPLETIONS
from tests.examples import examples

#: Every key that the reader looks at.
KEYS = (
    "choices index delta message text logprobs content token_logprobs tokens top_logprobs token_ids usage "
    "prompt_token_ids response_token_ids sglext input_ids output_ids provider_specific_fields raw_output error "
    "finish_reason tool_calls function_call function name arguments id object token logprob completion_tokens "
    "prompt_tokens system_fingerprint reasoning_content"
).split()
HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["", "stop", "token_id:7", "error"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@examples(400)
@given(
    chunks=st.lists(
        st.fixed_dictionaries(
            {}, optional={"choices": st.lists(HOSTILE, max_size=2) | HOSTILE, "usage": HOSTILE, "sglext": HOSTILE}
        )
        | HOSTILE,
        max_size=4,
    ),
    name=st.sampled_from(NAMES),
    wire=st.sampled_from([CHAT, COMPLETIONS]),
    request_body=st.sampled_from(
        [{}, {"stream": True}, {"logprobs": True, "top_logprobs": 1}, {"prompt": ["a", "b"], "n": 2},
         {"prompt": "a", "echo": True, "return_token_ids": True}, {"stream": True, "tools": [{}], "n": 2}]
    ),
)  # fmt: skip
@pytest.mark.slow
def test_no_answer_however_wrong_is_an_exception(
    chunks: list[Any], name: str, wire: str, request_body: dict[str, Any]
) -> None:
    adapter = engine(name)
    for whole in (False, True):
        reader = Reader(adapter, wire, request_body, adapter.ask(wire, request_body, CaptureOptions(top_logprobs=2)))
        for chunk in chunks:
            data = json.dumps(chunk).encode()
            forwarded = reader.body(data) if whole else reader.event(data)
            for event in () if forwarded is None else forwarded.split(b"\n\ndata: "):
                json.loads(event)
        reader.rest()
        body = reader.assembled()
        for outcome in ("ok", "aborted", "truncated", "error"):
            capture = reader.capture(outcome, status=200)
            orjson.dumps(capture.to_json())
            if capture.complete:
                assert all(c.complete for c in capture.completions)
        for part in stream_of(body, include_usage=True):
            json.dumps(part)
