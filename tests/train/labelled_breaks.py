"""Breaks with known causes: real conversations in real tokens (SmolLM2's tokenizer), edited as agents and engines do.

Each case is a call, what the next call sent, and the cause that a person who made the edit knows to be right.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from capture.breaks.breaks import CallView
from capture.record import Ids
from tests.train.smollm import encode, smollm

Message = dict[str, Any]
IM_END, END_OF_TEXT, IMAGE = 2, 0, 6


@dataclass(frozen=True)
class Case:
    name: str
    cause: str
    before: CallView
    after: CallView


def render(
    messages: list[Message],
    tools: list[Any] | None = None,
    *,
    ask: bool = True,
    end: str = "<|im_end|>\n",
    arguments: Callable[[str], str] = str,
    reasoning: Callable[[int, Message], bool] = lambda at, message: True,
    opens_thinking: bool = False,
    trim: bool = False,
    clock: str = "",
) -> str:
    """A chat template in the manner of Qwen's, with the habits that break token sequences as options."""
    out = ""
    rest = list(enumerate(messages))
    if tools:
        first = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
        rest = rest[1:] if first else rest
        listed = "".join("\n" + json.dumps(tool) for tool in tools)
        out += f"<|im_start|>system\n{first}# Tools\n\n<tools>{listed}\n</tools>{end}"
    for at, message in rest:
        content = message.get("content") or ""
        content = "\n".join(p.get("text", "<image>") for p in content) if isinstance(content, list) else content
        content = content.strip() if trim else content
        if message["role"] == "tool":
            out += f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response>{end}"
            continue
        out += f"<|im_start|>{message['role']}\n{clock if message['role'] == 'user' else ''}"
        if message.get("reasoning_content") and reasoning(at, message):
            out += f"<think>\n{message['reasoning_content']}\n</think>\n\n"
        out += content
        for call in message.get("tool_calls") or []:
            inner = arguments(call["function"]["arguments"])
            out += ("\n" if content else "") + (
                f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {inner}}}\n</tool_call>'
            )
        out += end
    return out + ("<|im_start|>assistant\n" + ("<think>\n" if opens_thinking else "") if ask else "")


def tool(name: str, *parameters: str, says: str = "") -> Message:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {
        "type": "function",
        "function": {"name": name, "description": says or f"{name} a file", "parameters": properties},
    }


SYSTEM = {"role": "system", "content": "You are a careful engineer. Today is 4 November 2026. Use the tools you have."}
USER = {"role": "user", "content": "Write the number 42 to the file /app/answer.txt, then tell me what you did."}
OTHER = {"role": "user", "content": "Explain in two sentences why the sky is blue, then name the capital of France."}
THANKS = {"role": "user", "content": "Thank you. And what is next?"}
TOOLS = [tool("write", "path", "content"), tool("bash", "command")]
ANSWER = "The sky is blue because air scatters short wavelengths. The capital of France is Paris."
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "ok: 2 bytes written to /app/answer.txt"}


def calling(arguments: str, name: str = "write", content: str | None = None) -> Message:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def says(content: str, reasoning: str | None = None) -> Message:
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def before(
    messages: list[Message],
    sampled: list[int],
    reply: Message,
    tools: list[Any] | None = None,
    finish: str = "stop",
    **more: Any,
) -> CallView:
    prompt = more.pop("prompt", None) or encode(render(messages, tools, **more.pop("options", {})))
    tokens = [smollm().decode([token], skip_special_tokens=False) for token in sampled]
    return CallView(
        call=0, prompt=Ids.of(prompt), sampled=Ids.of(sampled), messages=copy.deepcopy(messages), tools=tools,
        reply=reply, finish_reason=finish, tokens=tokens, **more,
    )  # fmt: skip


def after(
    messages: list[Message], tools: list[Any] | None = None, prompt: list[int] | None = None, **options: Any
) -> CallView:
    ids = prompt if prompt is not None else encode(render(messages, tools, **options))
    return CallView(call=1, prompt=Ids.of(ids), messages=copy.deepcopy(messages), tools=tools)


def spelled(text: str, *words: str) -> list[int]:
    """The text's tokens, with these words sampled letter by letter: a tokenization that encoding never gives."""
    ids: list[int] = []
    rest = text
    for word in words:
        head, found, rest = rest.partition(word)
        assert found, word
        ids += encode(head) + [token for letter in found for token in encode(letter)]
    ids += encode(rest)
    assert smollm().decode(ids, skip_special_tokens=False) == text and ids != encode(text)
    return ids


def cases() -> Iterator[Case]:
    yield from _retokenized()
    yield from _arguments()
    yield from _reasoning()
    yield from _history()
    yield from _cut()
    yield from _stop()
    yield from _system()
    yield from _images()
    yield from _dropped()
    yield from _unknown()
    yield from _mixed()


def _retokenized() -> Iterator[Case]:
    plain = [SYSTEM, OTHER]
    texts = {
        "a word in the middle": (ANSWER, "scatters"),
        "the first word": (ANSWER, "The sky"),
        "the last word": (ANSWER, "Paris"),
        "several words": (ANSWER, "blue", "short", "France"),
        "accents": ("Le café est fermé; voilà.", "fermé"),
        "code": ("def answer():\n    return 42\n", "return"),
    }
    for name, (text, *words) in texts.items():
        sampled = [*spelled(text, *words), IM_END]
        yield Case(
            f"retokenized: {name}", "reply_retokenized", before(plain, sampled, says(text)),
            after([*plain, says(text), THANKS]),
        )  # fmt: skip
    arguments = '{"path": "/app/answer.txt", "content": "42"}'
    text = f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'
    task = [SYSTEM, USER]
    yield Case(
        "retokenized: inside a tool call", "reply_retokenized",
        before(task, [*spelled(text, "answer"), IM_END], calling(arguments), TOOLS, "tool_calls"),
        after([*task, calling(arguments), RESULT], TOOLS),
    )  # fmt: skip


def _arguments() -> Iterator[Case]:
    task = [SYSTEM, USER]

    def case(name: str, wrote: str, sent: str, inner: Callable[[str], str] = str, content: str | None = None) -> Case:
        lead = f"{content}\n" if content else ""
        text = f'{lead}<tool_call>\n{{"name": "write", "arguments": {wrote}}}\n</tool_call>'
        got = calling(wrote, content=content)
        return Case(
            f"arguments: {name}", "arguments_reserialized",
            before(task, [*encode(text), IM_END], got, TOOLS, "tool_calls"),
            after([*task, calling(sent, content=content), RESULT], TOOLS, arguments=inner),
        )  # fmt: skip

    spaced, tight = '{"path": "/app/answer.txt", "content": "42"}', '{"path":"/app/answer.txt","content":"42"}'
    yield case("the agent took the spaces out", spaced, tight)
    yield case("the agent put spaces in", tight, spaced)
    yield case("the agent changed the order", spaced, '{"content": "42", "path": "/app/answer.txt"}')
    yield case("the template writes them with tojson", tight, tight, lambda text: json.dumps(json.loads(text)))
    accents = '{"path": "/app/été.txt", "content": "42"}'
    yield case("the template escapes accents", accents, accents, lambda text: json.dumps(json.loads(text)))
    truth = '{"path": "/app/answer.txt", "append": false}'
    yield case("the template writes False", truth, truth, lambda text: str(json.loads(text)).replace("'", '"'))
    yield case("after some words", spaced, tight, content="I write the file now.")
    # An older turn, changed two calls later.
    first, second = calling(spaced), says("Done: the file holds 42.")
    earlier = [*task, first, RESULT]
    changed = [*task, calling(tight), RESULT, second, THANKS]
    yield Case(
        "arguments: of an older turn", "arguments_reserialized",
        before(earlier, [*encode(second["content"]), IM_END], second, TOOLS), after(changed, TOOLS),
    )  # fmt: skip


def _reasoning() -> Iterator[Case]:
    thought = "The user wants a fact. Rayleigh scattering explains it, and the capital is Paris."
    plain = [SYSTEM, OTHER]
    text = f"<think>\n{thought}\n</think>\n\n{ANSWER}"
    gone = lambda at, message: False  # noqa: E731
    yield Case(
        "reasoning: the template drops the last reply's", "reasoning_stripped",
        before(plain, [*encode(text), IM_END], says(ANSWER, thought)),
        after([*plain, says(ANSWER, thought), THANKS], reasoning=gone),
    )  # fmt: skip
    yield Case(
        "reasoning: the agent sends none back", "reasoning_stripped",
        before(plain, [*encode(text), IM_END], says(ANSWER, thought)), after([*plain, says(ANSWER), THANKS]),
    )  # fmt: skip
    yield Case(
        "reasoning: in the text, cut by the agent", "reasoning_stripped",
        before(plain, [*encode(text), IM_END], says(text)), after([*plain, says(ANSWER), THANKS]),
    )  # fmt: skip
    opened = f"{thought}\n</think>\n\n{ANSWER}"
    yield Case(
        "reasoning: opened by the prompt", "reasoning_stripped",
        before(plain, [*encode(opened), IM_END], says(ANSWER, thought), options={"opens_thinking": True}),
        after([*plain, says(ANSWER), THANKS], opens_thinking=True),
    )  # fmt: skip
    second = "You are welcome. Next we look at the sunset."
    expected = [*plain, says(ANSWER, thought), THANKS]
    yield Case(
        "reasoning: of an older turn, by the template", "reasoning_stripped",
        before(expected, [*encode(second), IM_END], says(second)),
        after([*expected, says(second), THANKS], reasoning=gone),
    )  # fmt: skip
    yield Case(
        "reasoning: of an older turn, by the agent", "reasoning_stripped",
        before(expected, [*encode(second), IM_END], says(second)),
        after([*plain, says(ANSWER), THANKS, says(second), THANKS]),
    )  # fmt: skip


def _history() -> Iterator[Case]:
    long = {**RESULT, "content": "line of output\n" * 40}
    task = [SYSTEM, USER, calling('{"command": "make"}', "bash"), long]
    done = "The build went through."
    base = before(task, [*encode(done), IM_END], says(done), TOOLS)

    def case(name: str, messages: list[Message]) -> Case:
        return Case(f"history: {name}", "history_edited", base, after(messages, TOOLS))

    short = {**long, "content": "line of output\n… 39 lines cut"}
    yield case("an old tool result was shortened", [*task[:3], short, says(done), THANKS])
    yield case("an old tool result was removed", [SYSTEM, USER, says(done), THANKS])
    summary = {"role": "user", "content": "Summary of the work so far: the build was run and went through."}
    yield case("compacted into a summary", [SYSTEM, summary, says(done), THANKS])
    yield case("the task was worded anew", [SYSTEM, {**USER, "content": "Write 42."}, *task[2:], says(done), THANKS])
    plain = [SYSTEM, OTHER]
    reply = before(plain, [*encode(ANSWER), IM_END], says(ANSWER))
    yield Case("history: the reply was left out", "history_edited", reply, after([*plain, THANKS]))
    for name, text in {
        "the reply was shortened": ANSWER.partition(".")[0] + ".",
        "the reply was added to": ANSWER + " (Checked by a person.)",
        "the reply was corrected": ANSWER.replace("short", "blue"),
    }.items():
        yield Case(f"history: {name}", "history_edited", reply, after([*plain, says(text), THANKS]))
    ask = [SYSTEM, USER]
    text = '{"path": "/app/answer.txt", "content": "42"}'
    call = calling(text)
    called = before(
        ask,
        [*encode(f'{ANSWER}\n<tool_call>\n{{"name": "write", "arguments": {text}}}\n</tool_call>'), IM_END],
        {**call, "content": ANSWER},
        TOOLS,
        "tool_calls",
    )
    renamed = calling(text, "bash")
    for name, calls in {
        "the tool calls were cleared": [],
        "the tool calls were left out": None,
        "the tool call was renamed": renamed["tool_calls"],
        "the arguments were emptied": calling("{}")["tool_calls"],
        "a tool call was added": [*call["tool_calls"], *renamed["tool_calls"]],
    }.items():
        back = {"role": "assistant", "content": ANSWER} | ({} if calls is None else {"tool_calls": calls})
        yield Case(f"history: {name}", "history_edited", called, after([*ask, back, THANKS], TOOLS))


def _cut() -> Iterator[Case]:
    plain = [SYSTEM, OTHER]
    for name, tail in {"a stop string": " STOP", "a longer stop string": "\nObservation: the"}.items():
        yield Case(
            f"cut: {name} was sampled and not sent", "cut_reply",
            before(plain, encode(ANSWER + tail), says(ANSWER)), after([*plain, says(ANSWER), THANKS]),
        )  # fmt: skip
    half = encode("The fox 🦊")[:-1]
    text = smollm().decode(half, skip_special_tokens=False)
    yield Case(
        "cut: max_tokens in the middle of a character", "cut_reply",
        before(plain, half, says(text), finish="length"), after([*plain, says(text.rstrip("\ufffd")), THANKS]),
    )  # fmt: skip
    spaced = encode("First, the air. Then, the light. \n\n")
    yield Case(
        "cut: max_tokens after white space, which was trimmed", "cut_reply",
        before(plain, spaced, says("First, the air. Then, the light. \n\n"), finish="length"),
        after([*plain, says("First, the air. Then, the light."), THANKS]),
    )  # fmt: skip
    some = encode(ANSWER)[:9]
    result = smollm().decode(some, skip_special_tokens=False)
    for name, outcome, code in (
        ("the agent left", "aborted", "stream_aborted"),
        ("it broke off", "truncated", "stream_error"),
    ):
        yield Case(
            f"cut: {name}", "cut_reply",
            before(plain, some, says(result), finish="length", outcome=outcome, codes=(code,)),
            after([*plain, says(result.rsplit(" ", 1)[0]), THANKS]),
        )  # fmt: skip


def _stop() -> Iterator[Case]:
    plain = [SYSTEM, OTHER]
    yield Case(
        "stop: the model ends with another token", "template_after_stop",
        before(plain, [*encode(ANSWER), END_OF_TEXT], says(ANSWER)), after([*plain, says(ANSWER), THANKS]),
    )  # fmt: skip
    yield Case(
        "stop: the template puts a line end before it", "template_after_stop",
        before(plain, [*encode(ANSWER), IM_END], says(ANSWER)),
        after(
            [*plain, says(ANSWER), THANKS],
            prompt=encode(render(plain)) + encode(ANSWER) + encode("\n<|im_end|>\n<|im_start|>user\nThank you."),
        ),
    )  # fmt: skip
    yield Case(
        "stop: the template ends turns with endoftext", "template_after_stop",
        before(plain, [*encode(ANSWER), IM_END], says(ANSWER)),
        after(
            [*plain, says(ANSWER), THANKS],
            prompt=encode(render(plain)) + encode(ANSWER) + [END_OF_TEXT] + encode("\n<|im_start|>user\nThank you."),
        ),
    )  # fmt: skip
    arguments = '{"path": "/app/answer.txt", "content": "42"}'
    text = f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'
    task = [SYSTEM, USER]
    yield Case(
        "stop: after a tool call", "template_after_stop",
        before(task, [*encode(text), END_OF_TEXT], calling(arguments), TOOLS, "tool_calls"),
        after([*task, calling(arguments), RESULT], TOOLS),
    )  # fmt: skip


def _system() -> Iterator[Case]:
    tomorrow = {**SYSTEM, "content": SYSTEM["content"].replace("4 Nov", "5 Nov")}
    done = "Done: the file holds 42."
    task = [SYSTEM, USER]
    base = before(task, [*encode(done), IM_END], says(done), TOOLS)
    rest = [USER, says(done), THANKS]
    yield Case("system: another date", "system_or_tools_changed", base, after([tomorrow, *rest], TOOLS))
    yield Case(
        "system: a tool was added",
        "system_or_tools_changed",
        base,
        after([SYSTEM, *rest], [*TOOLS, tool("read", "path")]),
    )
    yield Case("system: a tool was removed", "system_or_tools_changed", base, after([SYSTEM, *rest], TOOLS[:1]))
    yield Case("system: the order of tools", "system_or_tools_changed", base, after([SYSTEM, *rest], TOOLS[::-1]))
    described = [tool("write", "path", "content", says="Write text to a file"), TOOLS[1]]
    yield Case("system: a tool was described anew", "system_or_tools_changed", base, after([SYSTEM, *rest], described))
    yield Case(
        "system: a system prompt where there was none", "system_or_tools_changed",
        before([OTHER], [*encode(ANSWER), IM_END], says(ANSWER)), after([SYSTEM, OTHER, says(ANSWER), THANKS]),
    )  # fmt: skip


def _images() -> Iterator[Case]:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    look = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}
    reply = "A red square."
    head, tail = encode("<|im_start|>user\nWhat is this?\n"), encode("<|im_end|>\n<|im_start|>assistant\n")
    following = encode("A red square.<|im_end|>\n<|im_start|>user\nThank you.")

    def case(name: str, expected: int, sent: int) -> Case:
        return Case(
            f"image: {name}", "image_placeholders",
            before([look], [*encode(reply), IM_END], says(reply), prompt=[*head, *[IMAGE] * expected, *tail]),
            after([look, says(reply), THANKS], prompt=[*head, *[IMAGE] * sent, *tail, *following]),
        )  # fmt: skip

    yield case("expanded twice", 64, 4096)
    yield case("resized", 256, 196)
    yield case("one tile less", 144, 140)


def _dropped() -> Iterator[Case]:
    plain = [SYSTEM, OTHER]
    whole = encode(ANSWER)
    going_on = after([*plain, says(ANSWER), THANKS])
    yield Case(
        "dropped: a piece in the middle", "engine_dropped_ids",
        before(plain, [*whole[:5], *whole[9:], IM_END], says(ANSWER)), going_on,
    )  # fmt: skip
    yield Case(
        "dropped: the engine counted more", "engine_dropped_ids",
        before(plain, [*whole[:3], *whole[4:], IM_END], says(ANSWER), counted=len(whole) + 1), going_on,
    )  # fmt: skip
    yield Case(
        "dropped: said by the record", "engine_dropped_ids",
        before(plain, [*whole[:6], *whole[8:10]], says(ANSWER), codes=("streamed_tokens_dropped_by_parser",)), going_on,
    )  # fmt: skip
    arguments = '{"path": "/app/answer.txt", "content": "42"}'
    ids = encode(f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>')
    task = [SYSTEM, USER]
    yield Case(
        "dropped: from a streamed tool call", "engine_dropped_ids",
        before(task, [*ids[:4], *ids[12:], IM_END], calling(arguments), TOOLS, "tool_calls", counted=len(ids) + 1),
        after([*task, calling(arguments), RESULT], TOOLS),
    )  # fmt: skip


def _unknown() -> Iterator[Case]:
    plain = [SYSTEM, OTHER]
    yield Case(
        "unknown: the template writes the time of the call", "unknown",
        before(plain, [*encode(ANSWER), IM_END], says(ANSWER), options={"clock": "(10:41) "}),
        after([*plain, says(ANSWER), THANKS], clock="(10:42) "),
    )  # fmt: skip
    bare = before(plain, [*encode(ANSWER), IM_END], says(ANSWER))
    other = after(plain, prompt=encode(render([SYSTEM, THANKS])))
    yield Case(
        "unknown: other tokens, and nobody kept messages", "unknown",
        replace(bare, messages=None, tools=None, reply=None, tokens=None), replace(other, messages=None, tools=None),
    )  # fmt: skip


def _mixed() -> Iterator[Case]:
    """Two edits in one prompt: the cause is that of the first difference."""
    spaced, tight = '{"path": "/app/answer.txt", "content": "42"}', '{"path":"/app/answer.txt","content":"42"}'
    words = "I write the number to the file now."
    text = f'{words}\n<tool_call>\n{{"name": "write", "arguments": {spaced}}}\n</tool_call>'
    task = [SYSTEM, USER]
    yield Case(
        "mixed: words tokenized again, then arguments written anew", "reply_retokenized",
        before(task, [*spelled(text, "number"), IM_END], calling(spaced, content=words), TOOLS, "tool_calls"),
        after([*task, calling(tight, content=words), RESULT], TOOLS),
    )  # fmt: skip
    wrong = {**RESULT, "content": "ok"}
    yield Case(
        "mixed: arguments written anew, then the result edited", "arguments_reserialized",
        before(task, [*encode(text), IM_END], calling(spaced, content=words), TOOLS, "tool_calls"),
        after([*task, calling(tight, content=words), wrong, says("Done."), THANKS], TOOLS),
    )  # fmt: skip
    earlier = [*task, calling(spaced), RESULT]
    done = "Done: the file holds 42."
    yield Case(
        "mixed: an old result edited, and the reply tokenized again", "history_edited",
        before(earlier, [*spelled(done, "holds"), IM_END], says(done), TOOLS),
        after([*task, calling(spaced), wrong, says(done), THANKS], TOOLS),
    )  # fmt: skip
    later = {**SYSTEM, "content": SYSTEM["content"].replace("4 Nov", "5 Nov")}
    yield Case(
        "mixed: another date, and an old result edited", "system_or_tools_changed",
        before(earlier, [*encode(done), IM_END], says(done), TOOLS),
        after([later, USER, calling(spaced), wrong, says(done), THANKS], TOOLS),
    )  # fmt: skip
    thought = "The file must hold 42 and nothing else."
    reply = calling(spaced) | {"reasoning_content": thought}
    thinking = f'<think>\n{thought}\n</think>\n\n<tool_call>\n{{"name": "write", "arguments": {spaced}}}\n</tool_call>'
    yield Case(
        "mixed: reasoning left out, and arguments written anew", "reasoning_stripped",
        before(task, [*encode(thinking), IM_END], reply, TOOLS, "tool_calls"),
        after([*task, calling(tight), RESULT], TOOLS),
    )  # fmt: skip
