"""`bench demo`: a real model answers calls through the proxy, and what was captured is shown. Nothing is scripted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from capture.journal.call import Call
from capture.journal.journal import JournalReader
from capture.journal.layout import JOURNAL
from capture.record import Completion
from proxy import ProxyThread, Settings
from sandbox.demo.rollouts import loop_demo
from sandbox.embedded_engine import INSTALL, EmbeddedEngine
from sandbox.errors import EngineError

if TYPE_CHECKING:
    from openai import OpenAI

WRITE_TOOL = {
    "type": "function",
    "function": {
        "name": "write",
        "description": "Write a text file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
}
#: A model of 135 million parameters makes a tool call only after it has seen one.
TOOL_MESSAGES = [
    {"role": "user", "content": "Write hello to the file /tmp/a.txt."},
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "write", "arguments": {"path": "/tmp/a.txt", "content": "hello"}}\n'
        "</tool_call>",
    },
    {"role": "user", "content": "Write the number 42 to the file /app/answer.txt."},
]


@dataclass(frozen=True)
class Kind:
    """One kind of call: its name, and the request for the official client. It does not ask for token ids."""

    name: str
    request: dict[str, Any]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


KINDS = [
    Kind("plain", {"messages": ask("What is the capital of France?"), "max_tokens": 40}),
    Kind("streamed", {"messages": ask("What is the capital of France?"), "max_tokens": 40, "stream": True}),
    Kind("tools", {"messages": TOOL_MESSAGES, "tools": [WRITE_TOOL], "max_tokens": 64}),
    Kind("tools, streamed", {"messages": TOOL_MESSAGES, "tools": [WRITE_TOOL], "max_tokens": 64, "stream": True}),
    Kind("n=2", {"messages": ask("Name one animal."), "max_tokens": 24, "n": 2, "temperature": 1.0, "seed": 7}),
    Kind("stop string", {"messages": ask("What is the capital of France?"), "max_tokens": 40, "stop": ["Paris"]}),
    Kind("cut at 8 tokens", {"messages": ask("Tell me about the sea."), "max_tokens": 8}),
]


def demo(console: Console, out: Path) -> list[str]:
    """Starts an engine and a proxy, makes calls and rollouts, shows what was captured.

    Returns a sentence for each part that failed. Raises `EngineError` when the extra is not installed.
    """
    start = time.monotonic()
    folder = out / time.strftime("%Y-%m-%d__%H-%M-%S")
    with EmbeddedEngine() as engine:
        console.print(
            f"[bold]engine[/]  llama.cpp with SmolLM2-135M-Instruct on this machine's CPU, ready in "
            f"{time.monotonic() - start:.1f} s",
            soft_wrap=True,
        )
        settings = Settings(upstream=[engine.base_url], engine="llamacpp", model=engine.model, probe=False)
        with ProxyThread(settings) as proxy:
            console.print(f"[bold]proxy[/]   {proxy.base_url}, the only address that the calls below use\n")
            calls_demo(console, proxy, engine, folder / "calls")
        failures = loop_demo(console, engine, folder)
    if (page := token_page(folder)) is None:
        failures.append("bench view made no page")
    console.print(f"\nDone in {time.monotonic() - start:.0f} s. Every call is one line of:", highlight=False)
    console.print(str(folder / "calls" / JOURNAL), soft_wrap=True, highlight=False)
    if page is not None:
        console.print("\nEvery token of it, to look at in a browser (no network needed):", highlight=False)
        console.print(str(page), soft_wrap=True, highlight=False)
    for failure in failures:
        console.print(Text(f"failed: {failure}", style="red"), soft_wrap=True)
    return failures


def token_page(folder: Path) -> Path | None:
    """Writes the page of `bench view --html` for the folder; None when that failed, and standard error says why."""
    page = folder / "view.html"
    command = [sys.executable, "-m", "train", "view", str(folder), "--html", str(page)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)  # noqa: T201
        return None
    return page


def calls_demo(console: Console, proxy: ProxyThread, engine: EmbeddedEngine, folder: Path) -> None:
    """Makes one call of each kind with the official client in its own session, then shows the journal."""
    session = proxy.open_session("demo-calls", journal=folder / JOURNAL)
    client = official_client(session.base_url, session.api_key)
    texts = [make_call(client, engine.model, kind) for kind in KINDS]
    proxy.close_session(session.id)
    calls = sorted(JournalReader(folder / JOURNAL), key=lambda call: call.number)
    show_captures(console, [kind.name for kind in KINDS], calls)
    show_text_beside_ids(console, [kind.name for kind in KINDS], texts, calls, detokenizer(engine))


def official_client(base_url: str, api_key: str) -> OpenAI:
    """The `openai` client, without the environment's proxies: the address is this machine's."""
    try:
        from openai import DefaultHttpxClient, OpenAI
    except ImportError as error:
        raise EngineError(
            f"the demo calls with the official client ({error.name} is missing). Run: {INSTALL}"
        ) from error
    http = DefaultHttpxClient(trust_env=False, timeout=120)
    return OpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=http)


def make_call(client: OpenAI, model: str, kind: Kind) -> list[str]:
    """What the agent gets of each choice: its text, or its tool calls as `name(arguments)`."""
    request = {"model": model, "temperature": 0.0, **kind.request}
    if not request.get("stream"):
        answer = client.chat.completions.create(**request)
        return [seen(choice.message.content, choice.message.tool_calls or []) for choice in answer.choices]
    text, tools = "", dict[int, list[str]]()
    for chunk in client.chat.completions.create(**request):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                name_and_arguments = tools.setdefault(part.index, ["", ""])
                name_and_arguments[0] += part.function.name or ""
                name_and_arguments[1] += part.function.arguments or ""
    return [text + "".join(f"{name}({arguments})" for name, arguments in tools.values())]


def seen(content: str | None, tool_calls: Sequence[Any]) -> str:
    return (content or "") + "".join(f"{call.function.name}({call.function.arguments})" for call in tool_calls)


def show_captures(console: Console, names: Sequence[str], calls: Sequence[Call]) -> None:
    """One row per call: how many ids and logprobs were captured, and whether that is all of them."""
    table = Table(title="What was captured", title_justify="left", title_style="bold")
    for column in ("call", "kind"):
        table.add_column(column, no_wrap=True)
    for column in ("prompt ids", "sampled ids", "logprobs"):
        table.add_column(column, justify="right")
    table.add_column("complete", overflow="fold")
    for name, call in zip(names, calls, strict=True):
        capture = call.capture
        if capture is None:
            table.add_row(str(call.number), name, "", "", "", "no capture")
            continue
        table.add_row(
            str(call.number),
            name,
            str(len(capture.prompt_token_ids)) if capture.prompt_token_ids is not None else "-",
            counts(capture.completions, lambda choice: choice.token_ids),
            counts(capture.completions, lambda choice: choice.logprobs),
            Text("yes", style="green") if capture.complete else Text("no, see below", style="yellow"),
        )
    console.print(table)
    for name, call in zip(names, calls, strict=True):
        for field, missing in call.capture.unavailable.items() if call.capture else ():
            console.print(Text(f"  {name}: {missing.detail} ({field}, {missing.code})", style="yellow"), soft_wrap=True)
            break


def counts(choices: Sequence[Completion], part: Callable[[Completion], Any]) -> str:
    return " + ".join("-" if (values := part(choice)) is None else str(len(values)) for choice in choices) or "-"


def show_text_beside_ids(
    console: Console,
    names: Sequence[str],
    texts: Sequence[Sequence[str]],
    calls: Sequence[Call],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """One row per choice: the text the agent got, and what the captured ids decode to."""
    table = Table(
        title="\nWhat the agent saw, and what its ids say", title_justify="left", title_style="bold", show_lines=True
    )
    for column in ("kind", "the agent's answer", "sampled ids", "the ids, decoded by the engine"):
        table.add_column(column, overflow="fold")
    for name, answers, call in zip(names, texts, calls, strict=True):
        choices = call.capture.completions if call.capture else []
        for answer, choice in zip(answers, choices, strict=False):
            ids = choice.token_ids.tolist() if choice.token_ids is not None else []
            table.add_row(name, Text(visible(answer)), shortened(ids), Text(visible(decode(ids))))
    console.print(table)


def detokenizer(engine: EmbeddedEngine) -> Callable[[Sequence[int]], str]:
    """llama.cpp's own `/detokenize`, which keeps special tokens as text."""
    address = engine.base_url.removesuffix("/v1") + "/detokenize"

    def decode(ids: Sequence[int]) -> str:
        body = json.dumps({"tokens": list(ids)}).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - our own engine on this machine
            return str(json.load(answer)["content"])

    return decode


def visible(text: str) -> str:
    return text.replace("\n", "\\n")


def shortened(ids: Sequence[int], most: int = 6) -> str:
    return " ".join(str(token) for token in ids[:most]) + (f" … {len(ids)} ids" if len(ids) > most else "")
