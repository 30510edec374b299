"""Secrets leave what is stored; model text and token fields never change."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture.journal.redact import _KINDS, _SHORTEST, REDACTED, _Kind, redact, redact_text, redact_url, secrets_seen

#: One made-up secret of each kind, put together here so that no scanner takes this file for a leak.
SECRETS = {
    "private_key": "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIB\n-----END RSA PRIVATE" + " KEY-----",
    "openai_key": "sk-" + "proj-Ab3Ab3Ab3Ab3Ab3",
    "google_key": "AIza" + "Sy" + "a1" * 15,
    "aws_key": "AKIA" + "ABCDEFGHIJKLMNOP",
    "github_token": "ghp_" + "a1" * 15,
    "slack_token": "xoxb-" + "123456789012-abc",
    "huggingface_token": "hf_" + "a1" * 15,
    "provider_key": "gsk_" + "a1" * 15,
    "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0" + ".c2lnbmF0dXJl",
    "url_credentials": "https://user:pa55@example.org/x",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_each_kind_is_seen_and_can_be_replaced(kind: str) -> None:
    text = f"before {SECRETS[kind]}, after"
    assert secrets_seen({"messages": [{"content": text}]}) == [kind]
    cleaned = redact_text(text)
    assert REDACTED in cleaned and secrets_seen(cleaned) == []
    assert cleaned.startswith("before ") and cleaned.endswith(", after")


@pytest.mark.parametrize("kind", SECRETS)
def test_model_text_is_never_rewritten(kind: str) -> None:
    secret = SECRETS[kind]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"password": secret})}}
    entry = {"token": secret, "logprob": -1, "bytes": None, "top_logprobs": [{"token": secret, "logprob": -1}]}
    body = {
        "messages": [
            {"role": "system", "content": secret},
            {"role": "user", "content": [{"type": "text", "text": f"password={secret}"}]},
            {"role": "assistant", "content": None, "reasoning_content": secret, "tool_calls": [call]},
        ],
        "prompt": secret,
        "stop": [secret],
        "tools": [{"type": "function", "function": {"name": "f", "description": secret}}],
        "choices": [
            {
                "message": {"content": secret, "reasoning": secret, "tool_calls": [call]},
                "text": secret,
                "logprobs": {"content": [entry], "tokens": [secret]},
            }
        ],
    }
    assert redact(body) is body


@pytest.mark.parametrize(
    "field",
    ["api_key", "apikey", "x-api-key", "OPENAI_API_KEY", "password", "client_secret", "AWS_SECRET_ACCESS_KEY",
     "Cookie", "db_password", "session_token", "HF_ACCESS_TOKEN"],
)  # fmt: skip
def test_fields_that_contain_a_secret_are_blank(field: str) -> None:
    assert redact({"metadata": {field: "plain"}}) == {"metadata": {field: REDACTED}}
    assert redact({field: ["plain", {"a": "plain"}]}) == {field: [REDACTED, {"a": REDACTED}]}


@pytest.mark.parametrize("field", ["token", "tokens", "token_ids", "eos_token", "max_tokens", "stop_token", "key"])
def test_the_fields_own_words_are_not_secrets(field: str) -> None:
    body = {"extra": {field: "<|im_end|>"}}
    assert redact(body) is body


def test_how_a_key_is_sent_stays() -> None:
    assert redact({"headers": {"Authorization": "Bearer abc"}}) == {"headers": {"Authorization": f"Bearer {REDACTED}"}}


def test_an_error_that_repeats_a_key_does_not_keep_it() -> None:
    error = {"error": {"message": f"Incorrect API key provided: {SECRETS['openai_key']}.", "code": 401}}
    assert redact(error) == {"error": {"message": f"Incorrect API key provided: {REDACTED}.", "code": 401}}


def test_addresses_lose_user_and_signature_also_in_a_message() -> None:
    signed = "https://u:p@blobs.example/x.png?sv=1&sig=abc%2Fdef&size=2"
    clean = f"https://{REDACTED}@blobs.example/x.png?sv=1&sig={REDACTED}&size=2"
    assert redact_url(signed) == clean
    assert redact_url("https://ghost@example.org/a") == f"https://{REDACTED}@example.org/a"
    text = {"type": "text", "text": signed}
    image = {"type": "image_url", "image_url": {"url": signed, "detail": "low"}}
    body = {"messages": [{"role": "user", "content": [text, image]}]}
    (message,) = redact(body)["messages"]
    assert message["content"] == [text, {"type": "image_url", "image_url": {"url": clean, "detail": "low"}}]
    assert body["messages"][0]["content"] == [text, image], "what is sent to the engine is another object"


def test_the_headers_of_a_tool_server_are_cleaned() -> None:
    tool = {"type": "mcp", "server_url": "https://a.example", "headers": {"Authorization": "Bearer abc"}}
    assert redact({"tools": [tool]})["tools"][0]["headers"] == {"Authorization": f"Bearer {REDACTED}"}


@pytest.mark.parametrize(
    "text",
    ["task-force-of-the-whole-department", "the sk-learn package", "sk-some-long-kebab-case-name",
     "disk-Ab3Ab3Ab3Ab3Ab3", "a@b.example", "see https://example.org/@user", "hf_hub_download",
     "ghp_short", "eyJhbGci"],
)  # fmt: skip
def test_ordinary_text_is_not_a_secret(text: str) -> None:
    assert secrets_seen(text) == []
    assert redact_text(text) == text


def test_several_secrets_in_one_text_are_all_replaced() -> None:
    text = " ".join([SECRETS["provider_key"], "xai-" + "b2" * 15, SECRETS["provider_key"], SECRETS["github_token"]])
    assert redact_text(text) == " ".join([REDACTED] * 4)


HOSTILE: list[Any] = [
    "eyJ-" * 83_000, "sk- " * 83_000, "sk-" * 100_000, "://aaaa:" * 40_000, "-eyJaaaaaaaaaaa." * 20_000,
    "-----BEGIN PRIVATE" + " KEY-----" * 33_000, "?sig=" * 66_000, "-----BEGIN " * 30_000, "xoxb-" * 66_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:12] for text in HOSTILE])
def test_no_text_takes_more_than_linear_time(text: str) -> None:
    began = time.thread_time()
    secrets_seen(text)
    redact_text(text)
    assert time.thread_time() - began < 3, "such a text takes some milliseconds; a backtracking pattern takes minutes"


def test_images_of_responses_items_lose_their_signatures_and_texts_stay() -> None:
    signed, clean = "https://h/a.png?sig=abc", f"https://h/a.png?sig={REDACTED}"
    secret = {"type": "input_text", "text": "key sk-abcDEF123456789012345"}
    image = {"type": "input_image", "image_url": signed}
    items = [{"role": "user", "content": [secret, image]}, {"type": "function_call_output", "output": [image]}, "text"]
    redacted = redact({"input": items})["input"]
    assert redacted[0]["content"] == [secret, {**image, "image_url": clean}]
    assert redacted[1]["output"] == [{**image, "image_url": clean}] and redacted[2] == "text"
    plain = {"input": [{"content": [secret]}, {"output": secret["text"]}]}
    assert redact(plain) is plain


def test_prompts_of_ids_and_images_cost_nothing() -> None:
    image = {"image_url": {"url": "data:" + "A" * 5_000_000}}
    body = {"prompt": list(range(100_000)), "messages": [{"content": [image]}]}
    began = time.thread_time()
    assert secrets_seen(body) == [] and redact(body) is body
    assert time.thread_time() - began < 0.05


def test_an_anthropic_requests_text_is_kept_and_addresses_of_its_images_are_cleaned() -> None:
    key = "sk-ant-api03-abcDEF0123456789abcDEF"
    picture = {"type": "image", "source": {"type": "url", "url": "https://a.example/x.png?token=abc123def"}}
    body = {
        "system": [{"type": "text", "text": f"Use {key}."}],
        "tools": [
            {
                "name": "f",
                "description": f"Needs {key}.",
                "input_schema": {"properties": {"api_key": {"default": key}}},
            },
            {"type": "custom", "name": "g", "description": key, "input_schema": {}},
        ],
        "stop_sequences": [key],
        "messages": [
            {"role": "user", "content": [picture, {"type": "text", "text": key}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"api_key": key}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [picture]}]},
        ],
    }
    redacted = redact(body)
    cleaned = {"type": "url", "url": f"https://a.example/x.png?token={REDACTED}"}
    assert redacted["messages"][0]["content"][0]["source"] == cleaned
    assert redacted["messages"][2]["content"][0]["content"][0]["source"] == cleaned
    assert {name: redacted[name] for name in ("system", "tools", "stop_sequences")} == {
        name: body[name] for name in ("system", "tools", "stop_sequences")
    }
    assert redacted["messages"][1] == body["messages"][1] and redacted["messages"][0]["content"][1]["text"] == key
    answer = {"type": "message", "content": [{"type": "thinking", "thinking": key}, {"type": "text", "text": key}]}
    assert redact(answer) == answer


def test_long_texts_are_found_again_and_beside_each_other() -> None:
    key, filler = "sk-" + "Ab1" * 10, "the model wrote this and no more. " * 60
    for _ in range(2):  # the second time from what is remembered
        assert secrets_seen({"content": filler + key + filler}, {"content": filler}) == ["openai_key"]
        assert secrets_seen({"content": filler}, [{"text": "http://me:pw@host/"}]) == ["url_credentials"]
        assert secrets_seen({"content": filler}, {"content": key + filler}) == ["openai_key"]
        assert secrets_seen({"content": filler}) == []


def plainly(value: Any) -> Any:
    """What `redact` does, field by field and without a thought for time."""
    if isinstance(value, list):
        return [plainly(item) for item in value]
    if not isinstance(value, dict):
        return redact_text(value) if isinstance(value, str) else value
    made = {}
    for name, item in value.items():
        key = name.lower().replace("-", "_")
        if key in ("content", "messages", "tools", "input", "stop", "logprobs"):  # of texts alone here, no images
            made[name] = item
        elif any(key == end or key.endswith("_" + end) for end in ("api_key", "password", "cookie", "access_token")):
            made[name] = blank(item)
        else:
            made[name] = plainly(item)
    return made


def blank(value: Any) -> Any:
    if isinstance(value, list):
        return [blank(item) for item in value]
    if isinstance(value, dict):
        return {name: blank(item) for name, item in value.items()}
    return REDACTED if isinstance(value, str) and value else value


#: Names in every spelling, longer ones among them, and the Kelvin sign, whose small letter is a k.
names = st.builds(
    lambda before, name, upper: before + (name.upper() if upper else name),
    st.sampled_from(["", "", "x-", "my_", "my", "a" * 40 + "_", "a" * 40]),
    st.sampled_from(["api_key", "api-key", "password", "cookie", "access_token", "token", "api_\u212aey", "content",
                     "messages", "tools", "input", "stop", "logprobs", "model", "user"]),
    st.booleans(),
)  # fmt: skip
texts = st.builds(
    "".join,
    st.lists(
        st.sampled_from([*SECRETS.values(), " ", "\n", ".", "_", "a", "sk-", "data:", "https://", "a@b?sig=x",
                         "word " * 30]),
        max_size=5,
    ),
)  # fmt: skip
bodies = st.recursive(
    texts | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@given(bodies)
def test_redaction_is_the_plain_reading_of_its_rule(body: Any) -> None:
    assert redact(body) == plainly(body)


@pytest.mark.parametrize("deep", [False, True])
def test_what_was_found_in_tools_is_found_again(deep: bool) -> None:
    inner: Any = SECRETS["aws_key"]
    for _ in range(400 if deep else 1):  # deeper than orjson writes
        inner = {"description": inner}
    tools = [{"type": "function", "function": {"name": "f", **inner}}]
    values = [{"content": SECRETS["jwt"]}]
    for _ in range(2):
        assert secrets_seen({"temperature": 1.0, "tools": tools, "messages": values}) == ["aws_key", "jwt"]
        assert secrets_seen({"tools": [{}], "messages": values}, {"tools": tools}) == ["aws_key", "jwt"]
        assert secrets_seen({"tools": [{}], "messages": []}) == secrets_seen({"tools": {"tools": [tools[:0]]}}) == []


@given(st.lists(texts, max_size=6))
def test_secrets_are_seen_beside_other_texts_as_each_by_itself(several: list[str]) -> None:
    alone = {kind for text in several for kind in secrets_seen(text)}
    assert secrets_seen({"messages": [{"content": text} for text in several]}) == sorted(alone)
    long = [text + " " * 200 for text in several]
    assert secrets_seen(*long) == secrets_seen(long) == sorted(alone)


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if kind.name != "jwt"], ids=lambda kind: kind.name)
@given(st.data())
def test_no_secret_is_shorter_than_the_shortest(kind: _Kind, data: st.DataObject) -> None:
    assert len(data.draw(st.from_regex(kind.pattern, fullmatch=True))) >= _SHORTEST
