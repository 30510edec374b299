"""What a session holds for token-in is as large as it says, for its bound is counted by that."""

from __future__ import annotations

import gc
import tracemalloc

from capture.engines import engine
from capture.record import Completion, Ids, TokenCapture
from capture.token_in.parent import Conversation
from proxy.sessions.answer_cache import AnswerCache
from proxy.token_in.call_history import CallHistory, past_call

LENGTH = 20_000


def test_the_memory_of_a_bridged_call_is_counted() -> None:
    """The engine's rendering comes as a list of numbers, the prompt as text."""
    body = {"messages": [{"role": "user", "content": "a"}]}
    conversation = Conversation.of(body)
    assert conversation is not None
    answer = {"choices": [{"index": 0, "message": {"content": "b"}, "finish_reason": "stop", "stop_reason": None}]}
    history, calls = CallHistory(), []
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(6):
        rendered = Ids.from_json(list(range(number + 1_000, number + 1_000 + LENGTH)))
        prompt = Ids.parse_text(b",".join(b"%d" % token for token in range(number + 900, number + 900 + LENGTH)))
        capture = TokenCapture(
            "openai-chat",
            "vllm",
            {},
            prompt,
            [Completion(0, Ids.of([7, 8]), tokens=["b", ""], logprobs=[-0.1, -0.1])],
            {},
        )
        calls.append(past_call(number, conversation, rendered, engine("vllm"), body, capture, answer))
        history.add(calls[-1])
    del rendered, prompt, capture
    gc.collect()
    memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    result = sum(call.size for call in calls)
    assert len(list(history)) == 6 and 0.8 * result < memory < 1.25 * result


def test_stored_calls_are_not_traversed_by_the_garbage_collector() -> None:
    """It stops all calls while it runs: what it looks at must not grow with every call that is held."""
    body = {"messages": [{"role": "user", "content": "a"}] * 20}
    conversation = Conversation.of(body)
    assert conversation is not None
    answer = {"choices": [{"index": 0, "message": {"content": "b"}, "finish_reason": "stop", "stop_reason": None}]}
    completion = Completion(0, Ids.of([7, 8]), tokens=["b", ""], logprobs=[-0.1, -0.1])
    history, cache = CallHistory(), AnswerCache()
    looked_at = []
    for number in range(300):
        capture = TokenCapture("openai-chat", "vllm", {}, Ids.of([number]), [completion], {})
        history.add(past_call(number, conversation, None, engine("vllm"), body, capture, answer))
        cache.keep({f"resp_{number}": b"x"})
        if number in (99, 299):
            del capture
            gc.collect()
            looked_at.append(len(gc.get_objects()))
    assert looked_at[1] - looked_at[0] < 50 and len(list(history)) == 300
