"""What a session holds for token-in is as large as it says, for its bound is counted by that."""

from __future__ import annotations

import gc
import tracemalloc

from capture.continues import Conversation
from capture.engines import engine
from capture.record import Completion, Ids, TokenCapture
from proxy.held import HeldCalls, held_call

LENGTH = 20_000


def test_what_is_held_of_a_bridged_call_is_counted() -> None:
    """The engine's rendering comes as a list of numbers, the prompt as text."""
    body = {"messages": [{"role": "user", "content": "a"}]}
    conversation = Conversation.of(body)
    assert conversation is not None
    answer = {"choices": [{"index": 0, "message": {"content": "b"}, "finish_reason": "stop", "stop_reason": None}]}
    held, calls = HeldCalls(), []
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(20):
        rendered = Ids.from_json(list(range(number + 1_000, number + 1_000 + LENGTH)))
        prompt = Ids.parse_text(b",".join(b"%d" % one for one in range(number + 900, number + 900 + LENGTH)))
        capture = TokenCapture(
            "openai-chat",
            "vllm",
            {},
            prompt,
            [Completion(0, Ids.of([7, 8]), tokens=["b", ""], logprobs=[-0.1, -0.1])],
            {},
        )
        calls.append(held_call(number, conversation, rendered, engine("vllm"), body, capture, answer))
        held.add(calls[-1])
    del rendered, prompt, capture
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    said = sum(one.size for one in calls)
    assert len(list(held)) == 20 and 0.8 * said < kept < 1.25 * said
