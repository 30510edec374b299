"""What this proxy and its peers record, stream and lose: the same calls of OpenAI's client through each of them.

    python -m benchmarks.peers [--targets ours,rllm,openenv,litellm]

The engine is `scripted_vllm.py`, which knows what it sampled. Each record is compared with that: prompt ids, the ids
and logprobs of every choice, text and tool arguments. A peer is installed from PyPI into an environment of its own.
docs/comparison.md has the results.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from itertools import zip_longest
from pathlib import Path
from typing import Any

import openai

from benchmarks.peers.scripted_vllm import COUNT, PACE, TOOL, Call, Choice, Engine
from benchmarks.proxy.targets import Litellm, Missing, Ours, Packaged, Rllm, Target, free_port

# what each target recorded


def from_body(body: dict[str, Any]) -> Call:
    """A completed body in OpenAI's shape with vLLM's fields, as a record."""
    choices = []
    prompt = body.get("prompt_token_ids") or []
    for choice in body.get("choices") or []:
        extra = choice.get("provider_specific_fields") or {}
        ids = choice.get("token_ids") or extra.get("token_ids") or []
        prompt = prompt or choice.get("prompt_token_ids") or extra.get("prompt_token_ids") or []
        logprobs = choice.get("logprobs") or {}
        values = [entry["logprob"] for entry in logprobs.get("content") or []] or logprobs.get("token_logprobs") or []
        choices.append(Choice(ids, values, shown_of(choice.get("message") or {}) or choice.get("text") or ""))
    return Call(prompt, choices)


def shown_of(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    arguments = [(call.get("function") or {}).get("arguments") or "" for call in calls]
    return " | ".join(arguments) if calls else message.get("content") or ""


def recorded_by_ours(target: Ours) -> list[Call]:
    calls = []
    for path in target.journals():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            capture = record["metadata"]["token_capture"]
            body = (record.get("response") or {}).get("body") or {}
            shown = [choice.shown for choice in from_body(body).choices]
            choices = [
                Choice(captured["token_ids"], captured["logprobs"] or [], text)
                for captured, text in zip_longest(capture["completions"], shown, fillvalue="")
            ]
            calls.append(Call(capture["prompt_token_ids"] or [], choices))
    return calls


def recorded_by_rllm(target: Rllm) -> list[Call]:
    rows = []
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{target.database}?mode=ro", uri=True)) as store:
        rows = [json.loads(data) for (data,) in store.execute("SELECT data FROM traces ORDER BY rowid")]
    calls = []
    for row in rows:
        choice = Choice(row["completion_token_ids"], row["logprobs"] or [], shown_of(row["response_message"]))
        calls.append(Call(row["prompt_token_ids"], [choice]))
    return calls


class OpenEnv(Packaged):
    """OpenEnv's capture server, told that its engine gives tokens; a session's id is the agent's key."""

    name = "openenv"
    package = "openenv==0.10.0"

    def command(self) -> list[str]:
        self.port = free_port()
        engine = f"http://127.0.0.1:{self.engine_port}"
        return [
            str(self.bin / "python"), "-m", "openenv.core.harness.capture.server", "--llm-url", engine, "--model",
            "policy", "--capture-level", "tokens", "--port", str(self.port),
        ]  # fmt: skip

    def open_session(self) -> str:
        """A session for one call: in a session with tools, calls without them are not among the entries."""
        self.session: str = self.ask("/sessions", {})["session_id"]
        return self.session

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)


def recorded_by_openenv(target: OpenEnv) -> list[Call]:
    calls = []
    for entry in target.ask(f"/sessions/{target.session}/trace_entries")["entries"]:
        message = entry["response"]["choices"][0]["message"]
        choice = Choice(entry["completion_token_ids"], entry["per_token_logps"] or [], shown_of(message))
        calls.append(Call(entry["prompt_token_ids"], [choice]))
    return calls


class LitellmRecording(Litellm):
    """LiteLLM's proxy that asks for ids and logprobs, with a callback that writes what callbacks are given."""

    CALLBACK = """
import json, os
from litellm.integrations.custom_logger import CustomLogger

class Recorder(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        with open(os.environ["RECORDED"], "a") as file:
            file.write(json.dumps(response_obj.model_dump(), default=str) + "\\n")

recorder = Recorder()
"""

    def command(self) -> list[str]:
        command = super().command()
        (self.folder / "recorder.py").write_text(self.CALLBACK)
        path = self.folder / "config.yaml"
        text = path.read_text().replace(
            "      api_key: none\n",
            "      api_key: none\n      logprobs: true\n      extra_body: {return_token_ids: true}\n",
        )
        path.write_text(text.replace("litellm_settings:\n", "litellm_settings:\n  callbacks: [recorder.recorder]\n"))
        return command

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "RECORDED": str(self.folder / "recorded.jsonl")}


def recorded_by_litellm(target: Target) -> list[Call]:
    path = target.folder / "recorded.jsonl"
    return [from_body(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Peer:
    kind: type[Target]
    recorded: Callable[[Any], list[Call]]
    distribution: str = ""
    base: str = "/v1"
    key: Callable[[Any], str] = lambda _: "sk-bench"


PEERS = {
    "ours": Peer(Ours, recorded_by_ours),
    "rllm": Peer(Rllm, recorded_by_rllm, "rllm-model-gateway", "/sessions/peers/v1"),
    "openenv": Peer(OpenEnv, recorded_by_openenv, "openenv", key=OpenEnv.open_session),
    "litellm": Peer(LitellmRecording, recorded_by_litellm, "litellm"),
}


# the calls


@dataclass
class Seen:
    """What the client got: the text or arguments of each choice, and when the first piece of them came."""

    shown: list[str]
    first: float = 0.0
    leaked: set[str] = field(default_factory=set)


def chat(client: openai.OpenAI, **options: Any) -> Seen:
    answer = client.chat.completions.create(model="policy", messages=user("What is the sea like?"), **options)
    body = answer.model_dump()
    return Seen([shown_of(choice["message"]) for choice in body["choices"]], leaked=leaks(body))


def streamed(client: openai.OpenAI, *, leave_after: int = 0, **options: Any) -> Seen:
    messages = user(COUNT if leave_after else "What is the sea like?")
    seen = Seen([""] * (options.get("n") or 1))
    count = 0
    with client.chat.completions.create(model="policy", messages=messages, stream=True, **options) as stream:
        for event in stream:
            seen.leaked |= leaks(event.model_dump())
            for choice in event.choices:
                calls = choice.delta.tool_calls or []
                piece = choice.delta.content or "".join(
                    call.function.arguments or "" for call in calls if call.function
                )
                if piece and not seen.first:
                    seen.first = time.monotonic()
                seen.shown[choice.index] += piece
                count += bool(piece)
            if leave_after and count >= leave_after:
                break
    return seen


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def completions(client: openai.OpenAI) -> Seen:
    answer = client.completions.create(model="policy", prompt="The sea", logprobs=0)
    return Seen([choice.text for choice in answer.choices])


def leaks(body: dict[str, Any]) -> set[str]:
    """Fields of tokens that the client did not ask for."""
    found = {"prompt_token_ids"} if body.get("prompt_token_ids") else set()
    for choice in body.get("choices") or []:
        found |= {name for name in ("token_ids", "logprobs") if choice.get(name)}
    return found


CASES: dict[str, Callable[[openai.OpenAI], Seen]] = {
    "plain": chat,
    "plain, `logprobs: false`": partial(chat, logprobs=False),
    "streamed": streamed,
    "tools": partial(chat, tools=[TOOL]),
    "tools, streamed": partial(streamed, tools=[TOOL]),
    "n=2": partial(chat, n=2),
    "n=2, streamed": partial(streamed, n=2),
    "stop string": partial(chat, stop=[" deep"]),
    "left early": partial(streamed, leave_after=3),
    "completions": completions,
}


# the comparison


def run(peer: Peer, target: Any, engine: Engine, case: str) -> tuple[str, str]:
    """What the client got, and what was recorded, each in a few words."""
    key = peer.key(target)
    before, known = len(engine.calls), len(peer.recorded(target))
    url = f"http://127.0.0.1:{target.port}{peer.base}"
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30) as client:
        try:
            seen = CASES[case](client)
        except openai.APIError as error:
            return f"error {getattr(error, 'status_code', '')}".strip(), "nothing"
    left = case == "left early"
    until = time.monotonic() + (6 if left else 3)
    while time.monotonic() < until and not (len(engine.calls) > before and engine.calls[before].finished):
        time.sleep(0.05)
    truth = engine.calls[before]
    until = time.monotonic() + 3
    while time.monotonic() < until and len(peer.recorded(target)) <= known:
        time.sleep(0.05)
    records = peer.recorded(target)[known:]
    return client_words(seen, truth, left), record_words(records, truth, left)


def client_words(seen: Seen, truth: Call, left: bool) -> str:
    words = []
    if seen.first:
        words.append("live" if seen.first < truth.finished - PACE or truth.gone else "at the end")
    if left:
        words.append("engine stopped" if truth.gone else "engine runs on")
    elif seen.shown != [choice.shown for choice in truth.choices]:
        words.append(f"other content: {seen.shown!r}")
    if seen.leaked:
        words.append(f"shows {', '.join(sorted(seen.leaked))}")
    return ", ".join(words) or "as asked"


def record_words(records: list[Call], truth: Call, left: bool) -> str:
    if not records:
        return "nothing"
    record, words = records[0], []
    if record.prompt != truth.prompt:
        words.append("no prompt ids" if not record.prompt else "other prompt ids")
    if len(record.choices) < len(truth.choices):
        words.append(f"{len(record.choices)} of {len(truth.choices)} choices")
    for index, (choice, true) in enumerate(zip(record.choices, truth.choices, strict=False)):
        if left:
            size = len(choice.ids)
            exact = choice.ids == true.ids[:size] and choice.logprobs == true.logprobs[: len(choice.logprobs)]
            words.append(f"{size} ids and {len(choice.logprobs)} logprobs so far" if exact else "other ids")
            continue
        if choice.ids != true.ids:
            words.append(f"choice {index}: {len(choice.ids)} of {len(true.ids)} ids")
        if choice.logprobs != true.logprobs:
            words.append(f"choice {index}: {len(choice.logprobs)} of {len(true.logprobs)} logprobs")
        if choice.shown != true.shown:
            words.append(f"other content: {choice.shown!r}")
    return "; ".join(words) or "exact"


def version(peer: Peer, target: Any) -> str:
    if not peer.distribution:
        return "this tree"
    paths = [str(path) for path in target.bin.parent.glob("lib/python3*/site-packages")]
    return next((found.version for found in distributions(name=peer.distribution, path=paths)), "?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--targets", default=",".join(PEERS), help="what to compare, by name, comma-separated")
    engine = Engine()
    with tempfile.TemporaryDirectory() as folder:
        for name in parser.parse_args().targets.split(","):
            peer = PEERS[name]
            target: Any = peer.kind(engine.server_port, Path(folder))
            try:
                target.install()
                target.start()
            except Missing as reason:
                print(f"{name}: not measured: {reason}", file=sys.stderr)
                continue
            try:
                print(f"\n{name} {version(peer, target)}\n\n| call | the client got | recorded |\n|---|---|---|")
                for case in CASES:
                    print(f"| {case} | {' | '.join(run(peer, target, engine, case))} |", flush=True)
            finally:
                target.stop()
