"""A test double of vLLM's server whose model follows a script: it writes 42 with whatever tools an agent offers it.

Only the sampling is played. Prompts are rendered from the messages by a chat template and tokenized with SmolLM2's own
tokenizer, sampled ids are the tokens of what the script says, and answers have vLLM 0.32's shapes (hermes tool parser),
so that a prompt continues an earlier call exactly where it would with the real engine: where the agent gives back
what it got. It stands beside `tests/live`, where the same agents meet real engines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import jinja2

from tests.capture.engines.logprob_modes import PEAKED, alternatives, is_measuring
from tests.train.smollm import encode, smollm

MODEL = "my-policy"
SHELL = re.compile("bash|shell|exec", re.IGNORECASE)
#: As Qwen2.5's own: the first system message above the tools, later ones where they stand, tool results as user turns.
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}
{%- endif %}{{- '# Tools\n\nYou may call one or more functions.\n<tools>' }}{%- for tool in tools %}{{- '\n' }}
{{- tool | tojson }}{%- endfor %}{{- '\n</tools>\n\nFor each function call, return a json object within <tool_call>' }}
{{- '</tool_call>.<|im_end|>\n' }}{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- elif m.role == 'assistant' and m.tool_calls %}{{- '<|im_start|>assistant' }}
{%- if m.content %}{{- '\n' + m.content }}{%- endif %}{%- for call in m.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif not (loop.first and m.role == 'system') %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{%- endfor %}{{- '<|im_start|>assistant\n' }}"""

Body = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What the model samples: a text, or a call of a tool, which `others` may follow in the same answer."""

    text: str = ""
    tool: str | None = None
    arguments: Body = field(default_factory=dict)
    others: tuple[Said, ...] = ()

    @property
    def calls(self) -> list[Said]:
        return [] if self.tool is None else [self, *self.others]

    @property
    def sampled(self) -> str:
        return "\n".join(call.block for call in self.calls) or self.text

    @property
    def block(self) -> str:
        return f'<tool_call>\n{{"name": "{self.tool}", "arguments": {json.dumps(self.arguments)}}}\n</tool_call>'


Script = Callable[[Body], Said]
#: Changes the lists of tool call fragments of a stream, in place: what other engines than vLLM make of them.
Rewrite = Callable[[list[list[Body]]], None]


def write_the_number(body: Body, path: str = "/app/answer.txt") -> Said:
    """Writes 42, looks at it, says so; an agent that ends by a command of its own gets that command."""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or [] if "function" in tool}
    if not tools:
        return Said(side_answer(body))
    done = sum(message["role"] == "tool" for message in body["messages"])
    commands = [f"printf 42 > {path}", f"cat {path}"]
    if "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in json.dumps(body["messages"]):
        commands.append("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    if done >= len(commands):
        return Said(f"Done: {path} holds 42.")
    return call_shell(tools, commands[done])


def call_shell(tools: dict[str, Body], command: str) -> Said:
    """A call of the tool that runs commands, its other required arguments filled in. Fails where there is none.

    A tool that watches a command (Qwen Code's `monitor`) takes one too, and answers later: a shell by name goes first.
    """
    for name, function in sorted(tools.items(), key=lambda item: not SHELL.search(item[0])):
        schema = function.get("parameters") or {}
        properties = schema.get("properties") or {}
        key = next((key for key in ("command", "cmd") if key in properties), None)
        if key is None or "path" in properties:
            continue
        command_value: Any = command if properties[key].get("type") != "array" else ["bash", "-lc", command]
        others = {other: plausible(properties[other]) for other in schema.get("required") or [] if other != key}
        return Said(tool=name, arguments={key: command_value, **others})
    raise AssertionError(f"no tool runs commands: {', '.join(tools)}")


def plausible(schema: Body) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    return {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}.get(
        str(schema.get("type")), "Writes the number"
    )


def side_answer(body: Body) -> str:
    """What a call without tools gets: a title, as JSON where a schema asks for it."""
    form = body.get("response_format") or {}
    if form.get("type") in ("json_schema", "json_object"):
        return json.dumps({"title": "Write the number"})
    return "Write the number"


class ScriptedEngine:
    """Serves on a free port of loopback while its block lasts; `seen` are the bodies of its model calls, in order.

    Calls that measure what its logprobs mean are answered as vLLM does by default, and are not among them.
    """

    def __init__(
        self, script: Script = write_the_number, *, model: str = MODEL, rewrite: Rewrite | None = None
    ) -> None:
        self.script = script
        self.rewrite = rewrite
        self.seen: list[Body] = []
        self.failed: list[str] = []
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.engine, self._server.connections = self, set()
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self.model = model

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._server.close_connections()

    def answer(self, body: Body) -> Generator[Body]:
        """The chunks of a streamed answer; the first is the only one of an unstreamed answer."""
        self.seen.append(body)
        prompt = encode(render(body))
        result = self.script(body)
        if not body.get("stream"):
            yield from whole(body, prompt, result)
            return
        made = list(chunks(body, prompt, result))
        if self.rewrite is not None and result.calls:
            self.rewrite([delta["tool_calls"] for delta in deltas(made) if delta.get("tool_calls")])
        yield from made


def render(body: Body) -> str:
    """The prompt's text, as vLLM makes it: content parts joined, tool arguments parsed."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    messages = [plain(message) for message in body["messages"]]
    return environment.from_string(TEMPLATE).render(messages=messages, tools=body.get("tools"))


def plain(message: Body) -> Body:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    made = {**message, "content": content or ""}
    if message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"] or "{}")}}
            for call in message["tool_calls"]
        ]
    return made


def sample(body: Body, reply: Said) -> tuple[list[int], str]:
    """The ids and why they end."""
    ids = encode(reply.sampled + "<|im_end|>")
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most and len(ids) > most:
        return ids[:most], "length"
    return ids, "stop" if reply.tool is None else "tool_calls"


def entry(token: int) -> Body:
    text = smollm().decode([token], skip_special_tokens=False)
    return {"token": text, "logprob": -(token % 64) / 64, "bytes": list(text.encode()), "top_logprobs": []}


def usage(prompt: list[int], ids: list[int]) -> Body:
    return {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + len(ids), "completion_tokens": len(ids),
            "prompt_tokens_details": None}  # fmt: skip


def whole(body: Body, prompt: list[int], reply: Said) -> Iterator[Body]:
    ids, reason = sample(body, reply)
    message: Body = {"role": "assistant", "content": reply.text or None, "refusal": None, "reasoning": None}
    if reason == "tool_calls":
        message["tool_calls"] = [
            {"id": f"chatcmpl-tool-{uuid.uuid4().hex}", "type": "function",
             "function": {"name": call.tool, "arguments": json.dumps(call.arguments)}}
            for call in reply.calls
        ]  # fmt: skip
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [entry(token) for token in ids]}
    asked = bool(body.get("return_token_ids"))
    yield {
        **head(body, "chat.completion"),
        "choices": [{**choice, "token_ids": ids if asked else None}],
        "usage": usage(prompt, ids),
        "prompt_token_ids": prompt if asked else None,
    }


def chunks(body: Body, prompt: list[int], reply: Said) -> Iterator[Body]:
    """One token a chunk; what the tool parser swallows has an empty delta and its ids all the same."""
    common, asked = head(body, "chat.completion.chunk"), bool(body.get("return_token_ids"))
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    yield {**common, "choices": [opening], **({"prompt_token_ids": prompt} if asked else {})}
    ids, reason = sample(body, reply)
    parser = Parser(reply)
    for at, token in enumerate(ids):
        choice: Body = {"index": 0, "delta": parser.feed(token), "logprobs": None, "finish_reason": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [entry(token)]}
        if at == len(ids) - 1:
            choice |= {"finish_reason": reason, "stop_reason": None}
        yield {**common, "choices": [{**choice, **({"token_ids": [token]} if asked else {})}]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**common, "choices": [], "usage": usage(prompt, ids)}


def deltas(made: list[Body]) -> Iterator[Body]:
    for chunk in made:
        for choice in chunk["choices"]:
            yield choice["delta"]


class Parser:
    """What each token shows the client: text as it is, a tool call's name at once and its arguments bit by bit."""

    def __init__(self, reply: Said) -> None:
        self.reply, self.at = reply, 0
        self.named: set[int] = set()
        self.spans: list[tuple[int, int, int]] = []  # where a call's name ends, its arguments begin and end
        base = 0
        for call in reply.calls:
            begin = call.block.index('"arguments": ') + len('"arguments": ')
            end = begin + len(json.dumps(call.arguments))
            self.spans.append((base + call.block.index('",') + 2, base + begin, base + end))
            base += len(call.block) + 1

    def feed(self, token: int) -> Body:
        text = smollm().decode([token], skip_special_tokens=False)
        start, self.at = self.at, self.at + len(text)
        if text == "<|im_end|>":
            return {"content": ""} if self.reply.tool is None else {}
        if self.reply.tool is None:
            return {"content": text}
        fragments: list[Body] = []
        for index, (name_end, begin, end) in enumerate(self.spans):
            if index not in self.named and self.at >= name_end:
                self.named.add(index)
                made = {"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function", "index": index}
                fragments.append({**made, "function": {"name": self.reply.calls[index].tool}})
            piece = self.reply.sampled[max(start, begin) : min(self.at, end)]
            if piece and self.at > begin and start < end:
                fragments.append({"index": index, "function": {"arguments": piece}})
        return {"content": None, "tool_calls": fragments} if fragments else {}


def head(body: Body, kind: str) -> Body:
    return {"id": f"chatcmpl-{uuid.uuid4().hex[:16]}", "object": kind, "created": 1795962986, "model": body["model"]}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    engine: ScriptedEngine
    connections: set[socket.socket]

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Ends those that clients keep open, as an engine's end does."""
        for connection in self.connections.copy():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client that leaves is nothing to report
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        sides: dict[str, Body] = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {
                "object": "list",
                "data": [
                    {"id": self.server.engine.model, "object": "model", "owned_by": "vllm", "max_model_len": 131072}
                ],
            },
        }
        body = sides.get(self.path.partition("?")[0])
        self.give(200 if body else 404, body or {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self.path == "/tokenize":
            ids = encode(render(body) if "messages" in body else body["prompt"])
            self.give(200, {"count": len(ids), "max_model_len": 131072, "tokens": ids, "token_strs": None})
            return
        if self.path != "/v1/chat/completions":
            self.give(404, {"detail": "Not Found"})
            return
        if is_measuring(body):
            self.give(200, head(body, "chat.completion") | alternatives(PEAKED, "raw", body))
            return
        try:
            made = self.server.engine.answer(body)
            first = next(made)
        except Exception as error:  # a request that vLLM would refuse, or a script that does not know what to do
            self.server.engine.failed.append(f"{type(error).__name__}: {error}")
            status = getattr(error, "status", 400)
            self.give(
                status, {"error": {"message": str(error), "type": "BadRequestError", "param": None, "code": status}}
            )
            return
        if not body.get("stream"):
            self.give(200, first)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in itertools.chain((first,), made):
                self.piece(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.piece(b"data: [DONE]\n\n")
            self.piece(b"")
        except ConnectionError:  # the client left
            made.close()
            self.close_connection = True

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def give(self, status: int, body: Body) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...
