"""What the official Anthropic client does against a real engine: one table, for the embedded one and for vLLM.

A case gets a client whose base URL is the proxy, and the name of the model. Whatever a small model says, its shape and
the counts must hold.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import pytest

Case = Callable[[anthropic.AsyncAnthropic, str], Awaitable[None]]
CASES: dict[str, Case] = {}

COLOURS: list[Any] = [{"role": "user", "content": "Name two colours."}]
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? One word."}]
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris? Use the tool."}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
#: A model of 135 million parameters makes a tool call only where it has seen one.
SHOWN: list[Any] = [
    {"role": "user", "content": "What is the weather in Rome?"},
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    },
    {"role": "user", "content": "What is the weather in Paris?"},
]
WEATHER: Any = {"name": "get_weather", "description": "The weather of a city", "input_schema": SCHEMA}
CLOCK: Any = {"name": "get_time", "description": "The time in a city", "input_schema": SCHEMA}
CALL: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
CALLED: list[Any] = [*ASK, {"role": "assistant", "content": [CALL]}]
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def case(name: str) -> Callable[[Case], Case]:
    def add(made: Case) -> Case:
        CASES[name] = made
        return made

    return add


def arguments(model: str, **more: Any) -> Any:
    """A request. The client of today no longer has an argument for the temperature; the API has."""
    extra = {"temperature": 0, **more.pop("extra_body", {})}
    return {"model": model, "max_tokens": 12, "messages": COLOURS, "extra_body": extra, **more}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_tokens(usage: Any) -> int:
    return int(usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0))


async def streamed(api: anthropic.AsyncAnthropic, **body: Any) -> tuple[Any, list[Any]]:
    """The final message of a stream, and its raw events."""
    events = []
    async with api.messages.stream(**body) as stream:
        async for event in stream:
            events.append(event)
        return await stream.get_final_message(), events


@case("text")
async def text(api: anthropic.AsyncAnthropic, model: str) -> None:
    message = await api.messages.create(**arguments(model))
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "max_tokens")
    assert [block.type for block in message.content] == ["text"] and len(text_of(message)) > 10
    assert message.usage.output_tokens == 12 and prompt_tokens(message.usage) > 5
    assert message.id.startswith("msg_") and message.stop_sequence is None


@case("text, streamed")
async def text_streamed(api: anthropic.AsyncAnthropic, model: str) -> None:
    whole = await api.messages.create(**arguments(model))
    message, _ = await streamed(api, **arguments(model))
    assert text_of(message) == text_of(whole) and message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == 12 and prompt_tokens(message.usage) == prompt_tokens(whole.usage)


@case("raw events, in the order they must come")
async def raw_events(api: anthropic.AsyncAnthropic, model: str) -> None:
    kinds = [event.type async for event in await api.messages.create(**arguments(model), stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


@case("the text stream of the helper")
async def text_stream(api: anthropic.AsyncAnthropic, model: str) -> None:
    async with api.messages.stream(**arguments(model)) as stream:
        pieces = [piece async for piece in stream.text_stream]
        assert "".join(pieces) == await stream.get_final_text()


@case("the synchronous client")
async def synchronous(api: anthropic.AsyncAnthropic, model: str) -> None:
    def call() -> str:
        with anthropic.Anthropic(base_url=str(api.base_url), api_key=api.api_key, max_retries=0) as client:
            with client.messages.stream(**arguments(model)) as stream:
                return text_of(stream.get_final_message())

    assert await asyncio.to_thread(call) == text_of(await api.messages.create(**arguments(model)))


@case("the beta routes: ?beta=true")
async def beta(api: anthropic.AsyncAnthropic, model: str) -> None:
    message = await api.beta.messages.create(**arguments(model), betas=["interleaved-thinking-2025-05-14"])
    assert len(text_of(message)) > 10


@case("an end of its own")
async def end_turn(api: anthropic.AsyncAnthropic, model: str) -> None:
    message = await api.messages.create(**arguments(model, messages=CAPITAL, max_tokens=64))
    assert message.stop_reason == "end_turn" and "Paris" in text_of(message)


@case("a stop sequence is told back")
async def stop_sequence(api: anthropic.AsyncAnthropic, model: str) -> None:
    message = await api.messages.create(**arguments(model, max_tokens=40, stop_sequences=["world"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "world")
    assert "world" not in text_of(message)


@case("a stop sequence is told back in a stream")
async def stop_sequence_streamed(api: anthropic.AsyncAnthropic, model: str) -> None:
    message, _ = await streamed(api, **arguments(model, max_tokens=40, stop_sequences=["world"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "world")
    assert "world" not in text_of(message)


@case("a stop sequence that does not come")
async def stop_sequence_absent(api: anthropic.AsyncAnthropic, model: str) -> None:
    message = await api.messages.create(
        **arguments(model, messages=CAPITAL, max_tokens=64, stop_sequences=["Zanzibar"])
    )
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


@case("sampling, metadata and a field of the engine's")
async def sampling(api: anthropic.AsyncAnthropic, model: str) -> None:
    body = arguments(
        model, metadata={"user_id": "u"}, extra_body={"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 7}
    )
    first, second = await api.messages.create(**body), await api.messages.create(**body)
    assert text_of(first) == text_of(second)


@case("a system prompt as a string, as blocks, and in the messages")
async def system(api: anthropic.AsyncAnthropic, model: str) -> None:
    plain = await api.messages.create(**arguments(model, system="Be brief.\nBe kind."))
    blocks = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    as_blocks = await api.messages.create(**arguments(model, system=blocks))
    inside = [{"role": "system", "content": "Be brief.\nBe kind."}, *COLOURS]
    within = await api.messages.create(**arguments(model, messages=inside))
    assert prompt_tokens(plain.usage) == prompt_tokens(as_blocks.usage) == prompt_tokens(within.usage)
    assert text_of(plain) == text_of(as_blocks) == text_of(within)
    late = await api.messages.create(
        **arguments(model, messages=[*COLOURS, {"role": "system", "content": "Be brief."}])
    )
    assert prompt_tokens(late.usage) > prompt_tokens((await api.messages.create(**arguments(model))).usage)


@case("content blocks of text are one text")
async def content_blocks(api: anthropic.AsyncAnthropic, model: str) -> None:
    parts = [
        {"type": "text", "text": "Name two"},
        {"type": "text", "text": "colours.", "cache_control": {"type": "ephemeral"}},
    ]
    message = await api.messages.create(
        **arguments(model, messages=[{"role": "user", "content": "Name two\ncolours."}])
    )
    two = await api.messages.create(**arguments(model, messages=[{"role": "user", "content": parts}]))
    assert prompt_tokens(message.usage) == prompt_tokens(two.usage)


@case("tool_choice any: a call")
async def tool_any(api: anthropic.AsyncAnthropic, model: str) -> None:
    message = await api.messages.create(
        **arguments(model, messages=SHOWN, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=64)
    )
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (message.stop_reason, call.name) == ("tool_use", "get_weather") and isinstance(call.input, dict) and call.id


@case("tool_choice any, streamed: the input comes in pieces")
async def tool_any_streamed(api: anthropic.AsyncAnthropic, model: str) -> None:
    body = arguments(model, messages=SHOWN, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=64)
    whole = await api.messages.create(**body)
    message, events = await streamed(api, **body)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    (other,) = [block for block in whole.content if block.type == "tool_use"]
    assert (message.stop_reason, call.name, call.input) == ("tool_use", other.name, other.input)
    pieces = "".join(event.partial_json for event in events if event.type == "input_json")
    assert json.loads(pieces) == call.input == {"city": "Paris"}


@case("a call, its result, and the next call")
async def tool_loop(api: anthropic.AsyncAnthropic, model: str) -> None:
    body = arguments(model, messages=SHOWN, tools=[WEATHER], max_tokens=64)
    message, _ = await streamed(api, **body)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
    history = [
        *SHOWN,
        {"role": "assistant", "content": [block.to_dict() for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    after, _ = await streamed(api, **{**body, "messages": history})
    assert prompt_tokens(after.usage) > prompt_tokens(message.usage) + 8


@case("a named tool")
async def tool_named(api: anthropic.AsyncAnthropic, model: str) -> None:
    choice = {"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}
    message = await api.messages.create(
        **arguments(model, messages=ASK, tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=64)
    )
    assert {block.name for block in message.content if block.type == "tool_use"} <= {"get_time"}


@case("tool_choice auto and none")
async def tool_auto_none(api: anthropic.AsyncAnthropic, model: str) -> None:
    for choice in ("auto", "none"):
        message = await api.messages.create(
            **arguments(model, messages=ASK, tools=[WEATHER], tool_choice={"type": choice})
        )
        if choice == "none":
            assert all(block.type == "text" for block in message.content)


@case("tool results: text, blocks, none, an error")
async def tool_results(api: anthropic.AsyncAnthropic, model: str) -> None:
    results: list[dict[str, Any]] = [
        {"content": "18 degrees"},
        {"content": [{"type": "text", "text": "18"}, {"type": "text", "text": "degrees"}]},
        {},
        {"content": "no such city", "is_error": True, "cache_control": {"type": "ephemeral"}},
    ]
    counts = []
    for result in results:
        turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", **result}]}
        message = await api.messages.create(**arguments(model, messages=[*CALLED, turn], tools=[WEATHER]))
        counts.append(prompt_tokens(message.usage))
        assert message.usage.output_tokens > 0
    assert counts[2] < counts[0] and counts[2] < counts[3]


@case("two calls in one turn, their results and more text")
async def parallel_history(api: anthropic.AsyncAnthropic, model: str) -> None:
    calls = [
        {"type": "text", "text": "I will look."},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {"city": "Paris"}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "noon"},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
        {"type": "text", "text": "So?"},
    ]
    history = [*ASK, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    message, _ = await streamed(api, **arguments(model, messages=history, tools=[WEATHER, CLOCK]))
    assert message.usage.output_tokens > 0


@case("thinking in the history")
async def thinking_history(api: anthropic.AsyncAnthropic, model: str) -> None:
    thought = {"type": "thinking", "thinking": "They want colours.", "signature": "x"}
    turn = {"role": "assistant", "content": [thought, {"type": "text", "text": "Red."}]}
    again = {"role": "user", "content": "And another?"}
    message = await api.messages.create(
        **arguments(model, messages=[*COLOURS, turn, again], thinking={"type": "disabled"})
    )
    assert message.usage.output_tokens > 0


@case("an answer that goes on from a beginning")
async def prefill(api: anthropic.AsyncAnthropic, model: str) -> None:
    plain = text_of(await api.messages.create(**arguments(model)))
    begun = [*COLOURS, {"role": "assistant", "content": plain[:20]}]
    whole = text_of(await api.messages.create(**arguments(model, messages=begun)))
    message, _ = await streamed(api, **arguments(model, messages=begun))
    assert whole and not whole.startswith(plain[:20]) and text_of(message) == whole
    assert (plain[:20] + whole).startswith(plain[:30])


@case("count_tokens is what the call then counts")
async def count_tokens(api: anthropic.AsyncAnthropic, model: str) -> None:
    for body in ({"messages": COLOURS}, {"messages": CALLED[:1], "tools": [WEATHER], "system": "Be brief."}):
        counted = await api.messages.count_tokens(model=model, **body)  # type: ignore[arg-type]
        message = await api.messages.create(**arguments(model, **body))
        assert counted.input_tokens == prompt_tokens(message.usage)


@case("models")
async def models(api: anthropic.AsyncAnthropic, model: str) -> None:
    assert model in [model_info.id async for model_info in api.models.list()]


@case("a tool result without its call is refused")
async def result_without_call(api: anthropic.AsyncAnthropic, model: str) -> None:
    turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_9", "content": "x"}]}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\.content\.0.*toolu_9"):
        await api.messages.create(**arguments(model, messages=[*COLOURS, turn]))


@case("arguments in the history that are no object are refused")
async def malformed_arguments(api: anthropic.AsyncAnthropic, model: str) -> None:
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "get_weather", "input": '{"city'}]}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\.content\.0\.input"):
        await api.messages.create(**arguments(model, messages=[*COLOURS, turn, *COLOURS]))


@case("a block of an unknown type is refused")
async def unknown_block(api: anthropic.AsyncAnthropic, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0.*hologram"):
        await api.messages.create(**arguments(model, messages=[{"role": "user", "content": [{"type": "hologram"}]}]))


@case("an image to a model that reads text is an error of the request")
async def image(api: anthropic.AsyncAnthropic, model: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    turn = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]}
    with pytest.raises(anthropic.BadRequestError):
        await api.messages.create(**arguments(model, messages=[turn]))


@case("a prompt beyond the context is an error of the request, streamed and not")
async def too_long(api: anthropic.AsyncAnthropic, model: str) -> None:
    body = arguments(model, messages=[{"role": "user", "content": "word " * 20000}])
    with pytest.raises(anthropic.BadRequestError) as whole:
        await api.messages.create(**body)
    assert whole.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert whole.value.body["error"]["message"].startswith("prompt is too long")  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        await streamed(api, **body)


@case("fields that cannot be kept are named")
async def unknown_field(api: anthropic.AsyncAnthropic, model: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="holograms"):
        await api.messages.create(**arguments(model, extra_body={"holograms": 3}))
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        await api.beta.messages.create(
            **arguments(model, mcp_servers=[{"type": "url", "url": "http://x", "name": "x"}])
        )


@case("a raw answer is JSON, with a status")
async def raw(api: anthropic.AsyncAnthropic, model: str) -> None:
    answer = await api.messages.with_raw_response.create(**arguments(model))
    assert answer.headers["content-type"].startswith("application/json") and answer.status_code == 200


@case("a schema for the output")
async def output_schema(api: anthropic.AsyncAnthropic, model: str) -> None:
    wanted = {"type": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}}
    message = await api.messages.create(
        **arguments(model, messages=ASK, max_tokens=48, output_config={"format": wanted})
    )
    if message.stop_reason == "end_turn":
        assert set(json.loads(text_of(message))) == {"city"}
    else:
        assert text_of(message).lstrip().startswith("{")
