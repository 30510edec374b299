"""What OpenAI's own client does with the Responses API, one case a function: for the embedded engine and for vLLM.

A case gets a client of the proxy and a model's name, and asserts what an agent would see.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel

Case = Callable[[AsyncOpenAI, str], Awaitable[None]]
CASES: dict[str, Case] = {}

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files"}
COLOURS = "Name two colours."
STEADY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12}


def asking(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages after which a model of 135M parameters calls a tool: it repeats what it said before.

    Asked to repeat the prompt alone it does so too, but not on every run: what the engine has in its prefix cache moves
    the last digits of its logits.
    """
    call = json.dumps({"name": name, "arguments": arguments})
    call = f"<tool_call>\n{call}\n</tool_call>"
    asked = {"role": "user", "content": f"Repeat exactly this and nothing else: {call}"}
    return [asked, {"role": "assistant", "content": call}, asked]


def case(function: Case) -> Case:
    CASES[function.__name__.replace("_", " ")] = function
    return function


async def text_of(api: AsyncOpenAI, **arguments: Any) -> str:
    response: Response = await api.responses.create(**arguments)
    return response.output_text


@case
async def a_text(api: AsyncOpenAI, model: str) -> None:
    response = await api.responses.create(model=model, input=COLOURS, **STEADY)
    assert response.output_text and response.object == "response"
    assert response.usage is not None and response.usage.output_tokens <= 12
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


@case
async def the_same_text_as_chat(api: AsyncOpenAI, model: str) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": COLOURS}]
    chat = await api.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=12)
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": COLOURS}]}]
    response = await api.responses.create(model=model, instructions="Be brief.", input=items, **STEADY)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


@case
async def a_developer_is_heard_as_the_system(api: AsyncOpenAI, model: str) -> None:
    user = {"role": "user", "content": COLOURS}
    items: Any = [{"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}, user]
    answer = await text_of(api, model=model, input=items, **STEADY)
    assert answer == await text_of(api, model=model, input=[user], instructions="Be brief.", **STEADY)


@case
async def an_answer_cut_by_its_length(api: AsyncOpenAI, model: str) -> None:
    response = await api.responses.create(model=model, input=COLOURS, temperature=0, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"


@case
async def a_stream(api: AsyncOpenAI, model: str) -> None:
    whole = await text_of(api, model=model, input=COLOURS, **STEADY)
    kinds, text, numbers = [], "", []
    async for event in await api.responses.create(model=model, input=COLOURS, stream=True, **STEADY):
        kinds.append(event.type)
        numbers.append(event.sequence_number)  # type: ignore[union-attr]
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == whole
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert numbers == list(range(len(numbers)))


@case
async def the_stream_helper(api: AsyncOpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "input": asking("get_weather", {"city": "Paris"}), "temperature": 0}
    async with api.responses.stream(**request, max_output_tokens=40, tools=[WEATHER]) as stream:
        snapshot = ""
        async for event in stream:
            if event.type == "response.function_call_arguments.delta":
                snapshot = event.snapshot
        final = await stream.get_final_response()
    (call,) = [item for item in final.output if item.type == "function_call"]
    assert call.arguments == snapshot and json.loads(call.arguments) == {"city": "Paris"}


@case
async def the_stream_helper_of_an_answer_that_is_cut(api: AsyncOpenAI, model: str) -> None:
    async with api.responses.stream(model=model, input=COLOURS, temperature=0, max_output_tokens=3) as stream:
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete" and last.response.output[0].status == "incomplete"  # type: ignore[union-attr]


@case
async def a_call_and_its_output(api: AsyncOpenAI, model: str) -> None:
    """The agent's loop: the answer's items go back as they came."""
    result: Any = asking("get_weather", {"city": "Paris"})
    request: dict[str, Any] = {"model": model, "tools": [WEATHER], "temperature": 0, "max_output_tokens": 40}
    first = await api.responses.create(input=result, **request)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, call.status, first.status) == ("get_weather", "completed", "completed")
    result += [item.to_dict() for item in first.output]
    result.append({"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "clear"}'})
    second = await api.responses.create(input=result, **request)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens


@case
async def a_custom_call_and_its_output(api: AsyncOpenAI, model: str) -> None:
    result: Any = asking("apply_patch", {"input": "*** Begin Patch"})
    request: dict[str, Any] = {"model": model, "tools": [PATCH], "temperature": 0, "max_output_tokens": 40}
    async with api.responses.stream(input=result, **request) as stream:
        deltas = "".join(
            [event.delta async for event in stream if event.type == "response.custom_tool_call_input.delta"]
        )
        first = await stream.get_final_response()
    (call,) = [item for item in first.output if item.type == "custom_tool_call"]
    assert call.name == "apply_patch" and call.input == deltas == "*** Begin Patch"
    result += [item.to_dict() for item in first.output]
    result.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"})
    assert (await api.responses.create(input=result, **request)).output


@case
async def a_tool_in_a_namespace(api: AsyncOpenAI, model: str) -> None:
    tools: Any = [{"type": "namespace", "name": "sky", "description": "The sky.", "tools": [WEATHER]}]
    prompt: Any = asking("sky__get_weather", {"city": "Paris"})
    response = await api.responses.create(model=model, input=prompt, tools=tools, temperature=0, max_output_tokens=40)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert (call.namespace, call.name) == ("sky", "get_weather")


@case
async def tools_that_openai_runs_do_no_harm(api: AsyncOpenAI, model: str) -> None:
    tools: Any = [{"type": "web_search"}]
    answer = await text_of(api, model=model, input=COLOURS, tools=tools, tool_choice="auto", **STEADY)
    assert answer == await text_of(api, model=model, input=COLOURS, **STEADY)


@case
async def what_was_said_before_by_its_id(api: AsyncOpenAI, model: str) -> None:
    first = await api.responses.create(model=model, input=COLOURS, **STEADY)
    by_id = await api.responses.create(model=model, input="More.", previous_response_id=first.id, **STEADY)
    messages: Any = [{"role": "user", "content": COLOURS}, *(item.to_dict() for item in first.output)]
    messages.append({"role": "user", "content": "More."})
    whole = await api.responses.create(model=model, input=messages, **STEADY)
    assert by_id.output_text == whole.output_text
    assert by_id.usage is not None and whole.usage is not None
    assert by_id.usage.input_tokens == whole.usage.input_tokens
    assert by_id.previous_response_id == first.id


@case
async def what_was_not_stored_is_not_known(api: AsyncOpenAI, model: str) -> None:
    first = await api.responses.create(model=model, input=COLOURS, store=False, **STEADY)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await api.responses.create(model=model, input="More.", previous_response_id=first.id)


class Colour(BaseModel):
    colour: str


@case
async def an_answer_of_a_type(api: AsyncOpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "input": COLOURS, "temperature": 0, "max_output_tokens": 60}
    response = await api.responses.parse(**request, text_format=Colour)
    assert isinstance(response.output_parsed, Colour)
    async with api.responses.stream(**request, text_format=Colour) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_parsed == response.output_parsed


@case
async def an_answer_in_json(api: AsyncOpenAI, model: str) -> None:
    form: Any = {"format": {"type": "json_object"}}
    prompt = 'Repeat exactly this and nothing else: {"a": 1}'
    response = await api.responses.create(model=model, input=prompt, text=form, temperature=0, max_output_tokens=60)
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text), dict)
    else:
        assert response.output_text.lstrip().startswith("{")


@case
async def logprobs(api: AsyncOpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "input": COLOURS, "temperature": 0, "max_output_tokens": 4}
    response = await api.responses.create(**request, include=["message.output_text.logprobs"], top_logprobs=2)
    part: Any = response.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(logprob.token for logprob in part.logprobs).startswith(part.text)
    assert all(logprob.logprob <= 0 and len(logprob.top_logprobs) == 2 for logprob in part.logprobs)
    plain: Any = (await api.responses.create(**request)).output[0]
    assert plain.content[0].logprobs == []


@case
async def what_an_answer_repeats(api: AsyncOpenAI, model: str) -> None:
    response = await api.responses.create(
        model=model, input=COLOURS, instructions="Be brief.", metadata={"a": "b"}, tools=[WEATHER],  # type: ignore[list-item]
        tool_choice="none", parallel_tool_calls=False, user="u", temperature=0, max_output_tokens=1,
    )  # fmt: skip
    result = response.to_dict()
    assert (result["instructions"], result["metadata"], result["tools"]) == ("Be brief.", {"a": "b"}, [WEATHER])
    assert (result["tool_choice"], result["parallel_tool_calls"], result["temperature"]) == ("none", False, 0)


@case
async def several_at_once(api: AsyncOpenAI, model: str) -> None:
    items = [f"Name {n} colours." for n in ("two", "three")]
    alone = [await text_of(api, model=model, input=item, **STEADY) for item in items]
    together = await asyncio.gather(*(text_of(api, model=model, input=item, **STEADY) for item in items))
    assert [text[:10] for text in together] == [text[:10] for text in alone]


@case
async def a_field_that_cannot_be_kept(api: AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.responses.create(model=model, input=COLOURS, reasoning={"mode": "pro"})  # type: ignore[typeddict-unknown-key]
    assert (refused.value.param, refused.value.type) == ("reasoning.mode", "invalid_request_error")


@case
async def an_item_of_an_unknown_kind(api: AsyncOpenAI, model: str) -> None:
    items: Any = [{"role": "user", "content": COLOURS}, {"type": "computer_call", "call_id": "c"}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(model=model, input=items, stream=stream)
        assert refused.value.param == "input[1].type"


@case
async def an_output_without_its_call(api: AsyncOpenAI, model: str) -> None:
    items: Any = [{"type": "function_call_output", "call_id": "call_9", "output": "x"}]
    with pytest.raises(openai.BadRequestError, match="call_9"):
        await api.responses.create(model=model, input=items)


@case
async def a_picture_for_a_model_that_sees_nothing(api: AsyncOpenAI, model: str) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, image]}]
    with pytest.raises(openai.BadRequestError) as refused:
        await api.with_options(max_retries=2).responses.create(model=model, input=items)
    assert refused.value.type == "invalid_request_error"


@case
async def a_prompt_beyond_the_context(api: AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await api.responses.create(model=model, input="word " * 20000, stream=True)
    assert refused.value.code == "context_length_exceeded"
