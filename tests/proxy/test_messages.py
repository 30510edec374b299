"""Anthropic's Messages through the proxy, by its official client, against bytes recorded from a real vLLM."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import FakeEngine, replays

GIVEN: dict[str, Any] = {"model": "my-policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10}


def client(bench: Bench) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=bench.proxy.base_url.removesuffix("/v1"), api_key="x", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
async def test_text_goes_there_and_back(started: Started, stream: bool) -> None:
    name = "vllm/chat-plain-length-" + ("stream" if stream else "nostream")
    async with FakeEngine(replays(name)) as engine, started(engine.url) as bench, client(bench) as api:
        if stream:
            async with api.messages.stream(**GIVEN) as events:
                message = await events.get_final_message()
        else:
            message = await api.messages.create(**GIVEN)
        call = bench.call()
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "The two most popular colours in the world are:"
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("max_tokens", 13, 10)
    assert call.response_body == {
        name: value for name, value in message.to_dict().items() if name in call.response_body
    }
    assert call.metadata["dialect"] == "anthropic-messages" and call.request["path"] == "/v1/messages"
    assert engine.calls[0].path == "/v1/chat/completions"
    assert call.capture is not None and call.capture.complete and call.capture.wire == "openai-chat"
