"""Responses requests as chat requests: what is kept, what is refused by name, what is dropped and listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParams
from pydantic import TypeAdapter

from proxy.dialects.base import ChatRequest
from proxy.dialects.responses.dialect import ResponsesDialect
from proxy.errors import Refusal

CHAT: TypeAdapter[Any] = TypeAdapter(CompletionCreateParams)
RESPONSES = ResponsesDialect()
CODEX = Path(__file__).parents[1] / "transcripts/codex"
ANSWER, OTHER = "a" * 32, "b" * 32
USER = {"role": "user", "content": "hi"}
SAID_HI = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: begin"}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def translated(earlier: dict[str, Any] | None = None, **body: Any) -> ChatRequest:
    made = RESPONSES.translate({"model": "my-policy", "input": "hi", **body}, earlier or {})
    CHAT.validate_python(made.chat)
    return made


def messages(*items: Any, earlier: dict[str, Any] | None = None, **body: Any) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = translated(earlier, input=list(items), **body).chat["messages"]
    return made


def call(call_id: str, name: str = "run", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def output(call_id: str, value: Any = "ok", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": value}


def function_call(call_id: str, name: str = "run", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, **more}


# the conversation


def test_a_text_is_what_the_user_says() -> None:
    assert translated().chat == {"model": "my-policy", "messages": [SAID_HI]}


def test_instructions_and_what_developers_say_first_are_one_system_message() -> None:
    developer = {"type": "message", "role": "developer", "content": [
        {"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]}  # fmt: skip
    made = messages(developer, {"role": "system", "content": "three"}, USER, instructions="zero")
    assert made == [{"role": "system", "content": "zero\n\none\ntwo\n\nthree"}, SAID_HI]


def test_what_a_developer_says_later_stays_where_it_is() -> None:
    made = messages(USER, assistant("yes"), {"role": "developer", "content": "now be brief"}, USER)
    assert [message["role"] for message in made] == ["user", "assistant", "system", "user"]


def test_one_turn_of_the_assistant_is_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs_x", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]}
    made = messages(USER, reasoning, assistant("I run it"), call("c1"), call("c2"), output("c1"), output("c2"))
    turn = {"role": "assistant", "content": "I run it", "reasoning": "h", "reasoning_content": "h"}
    assert made[1] == {**turn, "tool_calls": [function_call("c1"), function_call("c2")]}
    assert made[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
    ]


def test_calls_of_one_answer_are_one_message_also_where_outputs_stand_between_them() -> None:
    made = messages(
        USER,
        call("c1", id=f"fc_{ANSWER}_0"),
        output("c1", "1"),
        call("c2", id=f"fc_{ANSWER}_1"),
        output("c2", "2"),
        call("c3", id=f"fc_{OTHER}_0"),
        output("c3", "3"),
    )
    assert [message["role"] for message in made] == ["user", "assistant", "tool", "tool", "assistant", "tool"]
    assert made[1]["tool_calls"] == [function_call("c1"), function_call("c2")]


def test_two_answers_are_two_messages() -> None:
    made = messages(USER, assistant("one", id=f"msg_{ANSWER}_0"), call("c1", id=f"fc_{OTHER}_0"), output("c1"))
    assert [message["role"] for message in made] == ["user", "assistant", "assistant", "tool"]


def test_text_that_an_answer_continued_with_after_its_calls_is_joined_again() -> None:
    made = messages(
        USER,
        assistant("before", id=f"msg_{ANSWER}_0"),
        call("c1", id=f"fc_{ANSWER}_1"),
        assistant(" after", id=f"msg_{ANSWER}_2"),
        output("c1"),
    )
    assert made[1] == {"role": "assistant", "content": "before after", "tool_calls": [function_call("c1")]}


def test_two_texts_of_the_assistant_without_ids_stay_two() -> None:
    made = messages(USER, assistant("one"), {"role": "assistant", "content": "two"})
    assert [message["content"] for message in made] == ["hi", "one", "two"]


@pytest.mark.parametrize("arguments", ['{"a": 1}', '{"a":1}', "{bad", "[1]", " {} "])
def test_arguments_are_forwarded_unchanged(arguments: str) -> None:
    assert messages(USER, call("c1", arguments=arguments), output("c1"))[1]["tool_calls"] == [
        function_call("c1", arguments=arguments)
    ]


def test_no_arguments_are_an_empty_object() -> None:
    assert messages(USER, call("c1", arguments=""))[1]["tool_calls"] == [function_call("c1")]


def test_a_namespaced_call_has_the_name_that_the_model_knows() -> None:
    assert messages(USER, call("c1", namespace="agents"))[1]["tool_calls"] == [function_call("c1", "agents__run")]


def test_a_custom_call_is_a_call_with_one_text() -> None:
    patch = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'é "x"\n'}
    made = messages(USER, patch, output("c1", "done", "custom_tool_call_output"))
    arguments = made[1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"input": 'é "x"\n'}
    assert made[2]["content"] == "done"


def test_a_custom_call_of_this_session_has_the_arguments_that_were_sampled() -> None:
    patch = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "é"}
    sampled = '{ "input":"\\u00e9"}'
    made = messages(USER, patch, earlier={"arguments of c1": sampled})
    assert made[1]["tool_calls"][0]["function"]["arguments"] == sampled
    other = messages(USER, {**patch, "input": "e"}, earlier={"arguments of c1": sampled})
    assert other[1]["tool_calls"][0]["function"]["arguments"] == '{"input": "e"}'


def test_pictures_and_several_texts_stay_parts() -> None:
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": PIXEL, "detail": "low"},
        {"type": "input_image", "image_url": PIXEL, "detail": "auto"},
    ]
    made = messages({"role": "user", "content": parts}, call("c1"), output("c1", parts[:1]), output("c1", parts[:2]))
    image = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}
    seen = {"type": "text", "text": "see"}
    assert made[0]["content"] == [seen, image, {"type": "image_url", "image_url": {"url": PIXEL}}]
    assert made[2]["content"] == "see"
    assert made[3]["content"] == [seen, image]


REASONING = {"type": "reasoning", "id": "rs_1", "summary": []}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]}, "ab"),
        ({"summary": [{"type": "summary_text", "text": "s"}]}, "s"),
        ({"summary": [{"type": "summary_text", "text": "s"}], "content": None, "encrypted_content": None}, "s"),
    ],
)
def test_reasoning_comes_back_into_the_turn(fields: dict[str, Any], text: str) -> None:
    turn = messages(USER, {**REASONING, **fields}, assistant("so"))[1]
    assert (turn["reasoning"], turn["reasoning_content"], turn["content"]) == (text, text, "so")


def test_reasoning_without_anything_in_it_is_not_a_turn() -> None:
    assert messages(USER, REASONING, USER) == [SAID_HI, SAID_HI]


# what came before


def test_a_previous_response_brings_its_conversation_but_not_its_instructions() -> None:
    first = translated(instructions="be brief", input=[USER])
    reply = RESPONSES.reply(first)
    chat = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}
    body = reply.body(chat)
    entries = dict(reply.cache_entries())
    made = messages(USER, earlier=entries, previous_response_id=body["id"])
    assert made == [SAID_HI, {"role": "assistant", "content": "yes"}, SAID_HI]
    reference = {"type": "item_reference", "id": body["output"][0]["id"]}
    assert messages(USER, reference, USER, earlier=entries) == made
    again = translated(entries, previous_response_id=body["id"], input="x", store=False)
    reply = RESPONSES.reply(again)
    reply.body(chat)
    assert reply.cache_entries() == {}


# tools


def test_function_tools_are_chat_functions() -> None:
    strict = {**FUNCTION, "name": "b", "strict": True, "description": "B."}
    chat = translated(tools=[FUNCTION, strict], tool_choice="auto", parallel_tool_calls=False).chat
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}},
        {"type": "function", "function": {
            "name": "b", "description": "B.", "parameters": {"type": "object"}, "strict": True}},
    ]  # fmt: skip
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("auto", False)


def test_a_custom_tool_is_a_function_of_one_text_and_its_grammar_is_described() -> None:
    made = translated(tools=[{**PATCH, "format": LARK}, {**PATCH, "name": "b", "format": {"type": "text"}}])
    first, second = (tool["function"] for tool in made.chat["tools"])
    assert first["description"].startswith("Edits files.") and "lark" in first["description"]
    assert LARK["definition"] in first["description"]
    assert second["description"] == "Edits files."
    assert first["parameters"]["required"] == ["input"]
    assert made.dropped == ["tools[0].format"]


def test_a_namespace_is_its_functions() -> None:
    space = {"type": "namespace", "name": "agents", "description": "For agents.", "tools": [FUNCTION, PATCH]}
    made = translated(tools=[space])
    assert [tool["function"]["name"] for tool in made.chat["tools"]] == ["agents__run", "agents__apply_patch"]
    assert made.chat["tools"][0]["function"]["description"] == "For agents."
    assert made.dropped == []


def test_tools_that_openai_runs_are_left_out_and_reported() -> None:
    made = translated(tools=[FUNCTION, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}])
    assert len(made.chat["tools"]) == 1
    assert made.dropped == ["tools[1] (web_search)", "tools[2] (mcp)"]


def test_without_tools_nothing_about_tools_is_sent() -> None:
    made = translated(tools=[{"type": "web_search"}], tool_choice="auto", parallel_tool_calls=True)
    assert set(made.chat) == {"model", "messages"}


@pytest.mark.parametrize(
    ("choice", "chat"),
    [
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "run"}, {"type": "function", "function": {"name": "run"}}),
        ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}),
    ],
)
def test_tool_choice(choice: Any, chat: Any) -> None:
    assert translated(tools=[FUNCTION, PATCH], tool_choice=choice).chat["tool_choice"] == chat


def test_allowed_tools_are_the_tools() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]}
    chat = translated(tools=[FUNCTION, PATCH], tool_choice=allowed).chat
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["apply_patch"]
    assert chat["tool_choice"] == "required"


# the other fields


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"max_output_tokens": 20}, {"max_tokens": 20}),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}}},
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "n", "schema": {"type": "object"}, "strict": True}}},
        ),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"seed": 1, "top_k": 5, "min_p": 0.1, "stop": ["x"]}, {"seed": 1, "top_k": 5, "min_p": 0.1, "stop": ["x"]}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"truncation": "disabled", "store": True, "metadata": {"a": "b"}, "background": False, "n": None}, {}),
    ],
)  # fmt: skip
def test_fields_that_are_kept(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    made = translated(**fields)
    assert {name: value for name, value in made.chat.items() if name not in ("model", "messages")} == chat
    assert made.dropped == []


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_key": "k"}, {"client_metadata": {"a": "b"}}, {"user": "u"}, {"safety_identifier": "s"},
        {"service_tier": "flex"}, {"truncation": "auto"}, {"max_tool_calls": 3}, {"top_logprobs": 2},
        {"stream_options": {"include_obfuscation": False}}, {"prompt_cache_retention": "24h"}
    ],
)  # fmt: skip
def test_fields_that_change_nothing_are_left_out_and_reported(fields: dict[str, Any]) -> None:
    made = translated(**fields)
    assert set(made.chat) == {"model", "messages"}
    assert made.dropped == list(fields)


@pytest.mark.parametrize(
    ("fields", "dropped"),
    [
        ({"text": {"verbosity": "low"}}, ["text.verbosity"]),
        ({"text": {"verbosity": "high", "format": {"type": "text"}}}, ["text.verbosity"]),
        ({"reasoning": {"context": "all_turns"}}, ["reasoning.context"]),
        ({"reasoning": {"context": "auto"}, "text": {"verbosity": "medium"}}, []),
        ({"text": {"new": 1}, "reasoning": {"new": 1}}, ["text.new", "reasoning.new"]),
    ],
)
def test_what_codex_adds_for_models_it_knows_is_left_out_and_listed(fields: dict[str, Any], dropped: list[str]) -> None:
    made = translated(**fields)
    assert set(made.chat) == {"model", "messages"}
    assert made.dropped == dropped


EXEC: dict[str, Any] = {"type": "function", "name": "exec", "parameters": {"type": "object", "properties": {}}}
NAMESPACE: dict[str, Any] = {
    "type": "namespace", "name": "agents", "tools": [{**EXEC, "name": "send"}, {"type": "custom", "name": "patch"}],
}  # fmt: skip
SEARCH: dict[str, Any] = {
    "type": "tool_search", "execution": "client", "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}  # fmt: skip


def names(made: ChatRequest) -> list[str]:
    return [tool["function"]["name"] for tool in made.chat.get("tools", ())]


def test_additional_tools_join_those_of_the_request() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE, {"type": "web_search"}]}
    made = translated(input=[item, USER], tools=[EXEC])
    assert names(made) == ["exec", "agents__send", "agents__patch"]
    assert made.chat["messages"] == [SAID_HI]
    assert made.dropped == ["input[0].tools[1] (web_search)"]
    assert names(translated(input=[item, USER])) == ["agents__send", "agents__patch"]
    chosen = translated(input=[item, USER], tool_choice={"type": "function", "name": "send", "namespace": "agents"})
    assert chosen.chat["tool_choice"]["function"]["name"] == "agents__send"


def test_additional_tools_of_a_previous_response_stay() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [EXEC]}
    reply = RESPONSES.reply(translated(input=[item, USER]))
    body = reply.body({"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]})
    made = translated(dict(reply.cache_entries()), previous_response_id=body["id"], input="more")
    assert names(made) == ["exec"]


def calling(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    message = {"content": None, "tool_calls": [function_call(call_id, name, arguments)]}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}


def test_a_tool_search_of_the_agents_own_is_a_function_and_what_it_finds_joins_the_tools() -> None:
    reply = RESPONSES.reply(translated(tools=[EXEC, SEARCH]))
    [search] = reply.body(calling("s1", "tool_search", '{"query":  "x"}'))["output"]
    assert search == {
        "id": search["id"], "type": "tool_search_call", "status": "completed", "call_id": "s1", "execution": "client",
        "arguments": {"query": "x"},
    }  # fmt: skip
    found = {"type": "tool_search_output", "call_id": "s1", "execution": "client", "tools": [NAMESPACE, EXEC]}
    made = translated(dict(reply.cache_entries()), input=[USER, search, found], tools=[EXEC, SEARCH])
    assert names(made) == ["exec", "tool_search", "agents__send", "agents__patch"]
    assert made.dropped == []
    assert made.chat["messages"][1]["tool_calls"] == [function_call("s1", "tool_search", '{"query":  "x"}')]
    content = json.dumps([NAMESPACE, EXEC])
    assert made.chat["messages"][2] == {"role": "tool", "tool_call_id": "s1", "content": content}
    again = [USER, search, found, {**search, "call_id": "s2", "id": None}, {**found, "call_id": "s2"}]
    assert names(translated(input=again, tools=[EXEC, SEARCH])) == names(made)
    [item] = RESPONSES.reply(made).body(calling("p1", "agents__patch", '{"input": "+"}'))["output"]
    assert (item["type"], item["name"], item["namespace"], item["input"]) == (
        "custom_tool_call", "patch", "agents", "+",
    )  # fmt: skip


def test_a_tool_search_streams_as_one_item() -> None:
    reply = RESPONSES.reply(translated(tools=[SEARCH]))
    calls = [
        {"index": 0, "id": "s1", "function": {"name": "tool_search", "arguments": '{"que'}},
        {"index": 0, "function": {"arguments": 'ry": "x"}'}},
    ]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": {"tool_calls": [piece]}} for piece in calls]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    data = b"".join(reply.feed({"choices": [choice]}) for choice in choices) + reply.finish()
    sent = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]
    [done] = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert done["arguments"] == {"query": "x"}
    assert not any("delta" in event for event in sent)


def test_a_tool_search_that_openai_runs_is_left_out_and_its_items_refused() -> None:
    made = translated(tools=[EXEC, {"type": "tool_search"}, {**EXEC, "name": "later", "defer_loading": True}])
    assert names(made) == ["exec", "later"]
    assert made.dropped == ["tools[1] (tool_search)", "tools[2].defer_loading"]
    with pytest.raises(Refusal) as refused:
        translated(input=[USER, {"type": "tool_search_call", "execution": "server", "arguments": {}}])
    assert "input[1].type" in refused.value.message


def test_what_else_is_to_be_included_is_left_out_and_reported() -> None:
    made = translated(include=["reasoning.encrypted_content", "web_search_call.action.sources"])
    assert made.dropped == ["include[1]"]


REFUSED: dict[str, dict[str, Any]] = {
    "field_of_2030": {"field_of_2030": 1},
    "background": {"background": True},
    "conversation": {"conversation": "conv_1"},
    "prompt": {"prompt": {"id": "p"}},
    "context_management": {"context_management": [{"type": "compaction"}]},
    "n": {"n": 2},
    "max_tokens": {"max_tokens": 5},
    "response_format": {"response_format": {"type": "json_object"}},
    "text.format": {"text": {"format": {"type": "grammar"}}},
    "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "n"}}},
    "text": {"text": "json"},
    "reasoning.mode": {"reasoning": {"mode": "pro"}},
    "include": {"include": "reasoning"},
    "instructions": {"instructions": ["x"]},
    "input": {"input": None},
    "input[0]": {"input": ["hi"]},
    "previous_response_id": {"previous_response_id": "resp_gone"},
    "tools": {"tools": {"type": "function"}},
    "tools[0]": {"tools": ["run"]},
    "tools[0].name": {"tools": [{"type": "function"}]},
    "tool_choice": {"tool_choice": {"type": "web_search"}, "tools": [FUNCTION]},
    "tool_choice.tools[0]": {
        "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "no"}]},
        "tools": [FUNCTION],
    },
    "input[1].type": {"input": [USER, {"type": "computer_call_output", "call_id": "c"}]},
    "input[0].role": {"input": [{"role": "tool", "content": "x"}]},
    "input[0].content[0].type": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
    "input[0].content[0].image_url": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    "input[0].content": {"input": [{"role": "user", "content": 5}]},
    "input[1].call_id": {"input": [USER, output("c9")]},
    "input[2].call_id": {"input": [USER, call("c1"), output("c2", kind="custom_tool_call_output")]},
    "input[0].arguments": {"input": [call("c1", arguments={"a": 1})]},  # type: ignore[arg-type]
    "input[0].input": {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "n"}]},
    "input[0].encrypted_content": {"input": [{**REASONING, "encrypted_content": "gAAAAABo"}]},
    "input[1].encrypted_content": {"input": [USER, {**REASONING, "encrypted_content": "capture.reasoning.v1.%%"}]},
    "input[1]": {"input": [USER, {"type": "item_reference", "id": f"msg_{ANSWER}_0"}]},
}  # fmt: skip


@pytest.mark.parametrize("field", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(field: str) -> None:
    with pytest.raises(Refusal) as refused:
        RESPONSES.translate({"model": "m", "input": "hi", **REFUSED[field]}, {})
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"`{field}`")
    status, body = RESPONSES.error(refused.value.status, refused.value.message)
    error = json.loads(body)["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", field)
    assert error["message"] == refused.value.message


@pytest.mark.parametrize("form", ["json_schema", "text", ["json_object"], 5, True])
def test_a_format_that_is_not_an_object_is_refused(form: Any) -> None:
    """Found by the fuzzer, as a fault of ours."""
    with pytest.raises(Refusal, match=r"`text\.format` must be an object"):
        translated(text={"format": form})


def test_tool_choice_required_needs_a_tool() -> None:
    with pytest.raises(Refusal, match="tool_choice"):
        translated(tools=[{"type": "web_search"}], tool_choice="required")


def test_the_request_itself_is_not_changed() -> None:
    body = {"model": "m", "input": [USER, call("c1"), output("c1")], "tools": [FUNCTION, PATCH], "instructions": "x"}
    before = json.dumps(body)
    RESPONSES.translate(body, {})
    assert json.dumps(body) == before


# what Codex 0.171 sends (long texts shortened)


def recorded(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((CODEX / f"{name}.json").read_text())
    return body


@pytest.mark.parametrize("name", [path.stem for path in sorted(CODEX.iterdir())])
def test_what_codex_sends_is_a_chat_request(name: str) -> None:
    body = recorded(name)
    made = RESPONSES.translate(body, {})
    CHAT.validate_python(made.chat)
    assert [message["role"] for message in made.chat["messages"]][:3] == ["system", "user", "user"]
    assert {"prompt_cache_key", "client_metadata"} <= set(made.dropped)
    calls = [item for item in body["input"] if item["type"] in ("function_call", "custom_tool_call")]
    tool_calls = [call for message in made.chat["messages"] for call in message.get("tool_calls", ())]
    assert [call["id"] for call in tool_calls] == [item["call_id"] for item in calls]
    assert [call["function"]["name"] for call in tool_calls] == [item["name"] for item in calls]


def test_what_codex_sends_after_a_patch() -> None:
    made = RESPONSES.translate(recorded("apply-patch"), {})
    roles = [message["role"] for message in made.chat["messages"]]
    assert roles == ["system", "user", "user", "assistant", "tool", "assistant", "tool", "assistant", "tool"]
    assert made.chat["messages"][3]["reasoning"] == "I think so."
    names = [tool["function"]["name"] for tool in made.chat["tools"]]
    assert "apply_patch" in names and "multi_agent_v1__spawn_agent" in names and "web_search" not in names
    assert "tools[9] (web_search)" in made.dropped and "tools[3].format" in made.dropped
