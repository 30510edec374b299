"""Whole conversations through this proxy and through OpenEnv's capture: which rows a trainer would get of each shape.

    python -m benchmarks.peers.shapes [--targets ours,openenv] [--shapes streamed,abort,...]

The agents are OpenAI's, Anthropic's and Google's own clients. The engine renders each prompt from its messages and
tokenizes it, as vLLM does, so that a prompt continues a reply where the agent gave it back as it came. It knows what it
sampled, and each row is compared with that. OpenEnv 0.10 is installed from PyPI into an environment of its own, once.
docs/comparison.md has the results.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anthropic
import openai
from google import genai
from google.genai import types

from benchmarks.peers.compare import OpenEnv
from benchmarks.peers.rows import Sampled, TrainedRow, judge
from benchmarks.proxy.targets import Missing
from capture.journal.layout import JOURNAL
from proxy import ProxyThread, Settings
from tests.sandbox.scripted_engine import Body, Said, ScriptedEngine, chunks, encode, render, sample, whole
from train.rollouts.rollouts import find_rollouts
from train.tokens.rollout_tokens import read_tokens

PACE = 0.02
LONG = " ".join(f"{number} and" for number in range(60))
COMMANDS = ("ls -la", "cat  notes.txt", "wc -l notes.txt")
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
RUN = {"type": "function", "function": {"name": "run", "description": "Runs a command.", "parameters": SCHEMA}}


class Overloaded(Exception):
    status = 503


class Engine(ScriptedEngine):
    """Calls `run` twice and then says so; paced, and with a memory of what it sampled."""

    def __init__(self) -> None:
        super().__init__(self.say)
        self.sampled: list[Sampled] = []
        self.refusals = 0
        self.words = 0

    def say(self, body: Body) -> Said:
        """By the conversation: a long text, a word that is another each time, or a call of `run`."""
        last = str(body["messages"][-1].get("content"))
        if "Count far" in last:
            return Said(LONG)
        if "Say a word" in last:
            self.words += 1
            return Said(f"Word number {self.words} it is.")
        turns = sum(message["role"] == "assistant" for message in body["messages"])
        if not body.get("tools") or turns >= 2:
            return Said("That is all there is to see.")
        return Said(tool="run", arguments={"cmd": COMMANDS[turns]})

    def answer(self, body: Body) -> Generator[Body]:
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("the engine is overloaded")
        prompt, replies = encode(render(body)), [self.say(body) for _ in range(body.get("n") or 1)]
        made = [
            Sampled(prompt, ids, [-(token % 64) / 64 for token in ids]) for ids, _ in (sample(body, s) for s in replies)
        ]
        self.sampled += made
        if not body.get("stream"):
            answers = [next(whole(body, prompt, each)) for each in replies]
            choices = [{**answer["choices"][0], "index": at} for at, answer in enumerate(answers)]
            time.sleep(PACE * len(made[0].ids))
            counted = sum(len(each.ids) for each in made)
            usage = {"completion_tokens": counted, "total_tokens": len(prompt) + counted}
            yield {**answers[0], "choices": choices, "usage": {**answers[0]["usage"], **usage}}
            return
        ended = False
        try:
            for parts in zip(*(chunks(body, prompt, each) for each in replies), strict=False):
                for at, part in enumerate(parts):
                    yield {**part, "choices": [{**choice, "index": at} for choice in part["choices"]]}
                time.sleep(PACE)
            ended = True
        finally:
            for each in made:
                each.gone = not ended


# the targets


@dataclass
class Endpoint:
    """A session of a target: where an agent calls, with which key, and how its rows are read afterwards."""

    root: str
    key: str
    rows: Callable[[], list[TrainedRow]]
    notes: Callable[[], str] = lambda: ""


@contextmanager
def ours(engine: Engine, folder: Path) -> Iterator[Callable[..., Endpoint]]:
    """This proxy: a session per conversation, its rows read from the journal as every format of rows reads them."""
    with ProxyThread(Settings(upstream=[engine.base_url], engine="vllm", probe=False, model="my-policy")) as proxy:

        def open_session(calls: int | None = None) -> Endpoint:
            rollout = folder / f"rollout-{len(list(folder.iterdir()))}"
            budget = {} if calls is None else {"max_calls": calls}
            session = proxy.open_session(rollout.name, journal=rollout / JOURNAL, **budget)

            def tokens() -> Any:
                proxy.close_session(session.id)
                [found] = find_rollouts(rollout)
                return read_tokens(found)

            def rows() -> list[TrainedRow]:
                read = tokens()
                parts = [
                    part for part, note in zip(read.segments, read.segment_notes, strict=True) if note["trainable"]
                ]
                return [
                    TrainedRow(
                        [*part.prompt_ids.tolist(), *part.completion_ids.tolist()],
                        [0] * len(part.prompt_ids) + part.completion_mask,
                        [0.0] * len(part.prompt_ids) + part.completion_logprobs,
                    )
                    for part in parts
                ]

            return Endpoint(session.anthropic_base_url, session.api_key, rows)

        yield open_session


@contextmanager
def openenv(engine: Engine, folder: Path) -> Iterator[Callable[..., Endpoint]]:
    """OpenEnv's capture server: its export of a session, of which it marks the rows that are for training."""
    target = OpenEnv(int(engine.base_url.split(":")[2].split("/")[0]), folder)
    target.model = "my-policy"
    target.install()
    target.start()

    def open_session(calls: int | None = None) -> Endpoint:
        asked = {} if calls is None else {"max_model_calls": calls}
        key = target.ask("/sessions", asked)["session_id"]

        def rows() -> list[TrainedRow]:
            document = target.ask(f"/sessions/{key}/rollout")
            return [
                TrainedRow(row["input_ids"], row["loss_mask"], row["logprobs"])
                for row in document["sequences"]
                if row["trainable"]
            ]

        return Endpoint(f"http://127.0.0.1:{target.port}", key, rows)

    try:
        yield open_session
    finally:
        target.stop()


TARGETS = {"ours": ours, "openenv": openenv}


# the agents


@dataclass
class Agent:
    """An agent on OpenAI's client: it gives replies back as it got them, and runs the tool that is called."""

    client: openai.OpenAI
    system: str = "You are a careful engineer."
    messages: list[Any] = field(default_factory=list)
    first: float = 0.0

    def __post_init__(self) -> None:
        self.messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": "What is in notes.txt?"},
        ]

    def ask(self, **options: Any) -> Any:
        """One streamed call; the message as the client put it together, and when its first piece came."""
        began = time.monotonic()
        with self.client.chat.completions.stream(
            model="my-policy", messages=self.messages, tools=cast(Any, [RUN]), **options
        ) as stream:
            self.first = 0.0
            for event in stream:
                if event.type in ("content.delta", "tool_calls.function.arguments.delta") and not self.first:
                    self.first = time.monotonic() - began
            return stream.get_final_completion().choices[0].message

    def take(self, message: Any) -> None:
        """The reply goes into the conversation, and what its tools say."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls or []
        ]
        self.messages.append(
            {"role": "assistant", "content": message.content, **({"tool_calls": calls} if calls else {})}
        )
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": "3 lines"} for call in calls]

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.take(self.ask())


Shape = Callable[[Endpoint, Engine], tuple[list[int], str]]


def client(door: Endpoint, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{door.root}/v1", api_key=door.key, timeout=60, **{"max_retries": 0, **options})


def streamed(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    agent = Agent(client(door))
    agent.messages[1]["content"] = "Count far."
    began = time.monotonic()
    agent.take(agent.ask())
    took, first = time.monotonic() - began, agent.first
    agent.messages.append({"role": "user", "content": "What is in notes.txt?"})
    agent.turns(2)
    return [0, 1, 2], f"first piece after {first:.2f} s of {took:.2f} s"


def aborted(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    agent = Agent(client(door))
    asked = [*agent.messages[:1], {"role": "user", "content": "Count far."}]
    stream = agent.client.chat.completions.create(
        model="my-policy", messages=asked, tools=cast(Any, [RUN]), stream=True
    )
    for number, _ in enumerate(stream):
        if number == 4:
            break
    stream.close()
    time.sleep(PACE * 30)
    stopped = engine.sampled[0].gone
    if not stopped:
        time.sleep(PACE * len(engine.sampled[0].ids))  # until it has sampled all
        engine.sampled[0].gone = True
    agent.turns(3)
    return [1, 2, 3], "the engine stopped" if stopped else "the engine sampled to its end"


def two_choices(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    agent = Agent(client(door))
    agent.messages[1]["content"] = "Say a word."
    try:
        answer = agent.client.chat.completions.create(model="my-policy", messages=agent.messages, n=2)
    except openai.APIStatusError as error:
        return [1, 2], f"refused with {error.status_code}"
    agent.take(answer.choices[1].message)
    agent.messages.append({"role": "user", "content": "Say a word again."})
    agent.take(agent.client.chat.completions.create(model="my-policy", messages=agent.messages).choices[0].message)
    return [1, 2], f"{len(answer.choices)} choices"


def retried(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    agent = Agent(client(door, max_retries=3))
    agent.turns(1)
    engine.refusals = 1
    try:
        agent.turns(2)
    except openai.APIStatusError as error:
        return [0, 1, 2], f"the agent got {error.status_code}"
    finally:
        engine.refusals = 0
    return [0, 1, 2], "the client asked again"


def resampled(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    agent = Agent(client(door))
    agent.turns(1)
    agent.messages[-1]["content"] = "Say a word."
    agent.ask()
    agent.turns(2)
    return [0, 2, 3], "the second reply is used"


def interleaved(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    agents = [Agent(client(door), "You are the first of two."), Agent(client(door), "You are the second of two.")]
    for _ in range(3):
        for agent in agents:
            agent.turns(1)
    return list(range(6)), "two conversations, turn by turn"


def sub_agent(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    main, other = Agent(client(door)), Agent(client(door), "You are a subagent working for a parent agent.")
    other.messages[1]["content"] = "Look at notes.txt for me."
    main.turns(1)
    other.turns(2)
    main.turns(2)
    return [0, 3, 4], "calls of the main agent are wanted"


def rewritten(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    agent = Agent(client(door))
    for _ in range(3):
        agent.take(agent.ask())
        for call in agent.messages[-2].get("tool_calls") or []:
            function = call["function"]
            function["arguments"] = json.dumps({"timeout": 5, **json.loads(function["arguments"])})
    return [0, 1, 2], "an argument is added"


def budget(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    agent = Agent(client(door))
    agent.turns(2)
    try:
        reply = agent.ask()
    except openai.APIStatusError as error:
        return [0, 1], f"the third call: {error.status_code}"
    calls = "a tool call" if reply.tool_calls else f"{reply.content!r}"
    return [0, 1], f"the third call: {calls}"


def responses(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    tool = {"type": "function", "name": "run", "description": "Runs a command.", "parameters": SCHEMA}
    items: list[Any] = [{"role": "user", "content": "What is in notes.txt?"}]
    for _ in range(3):
        for event in client(door).responses.create(
            model="my-policy", input=items, tools=cast(Any, [tool]), stream=True
        ):
            if event.type == "response.completed":
                answer = event.response
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "3 lines"}
            for item in answer.output
            if item.type == "function_call"
        ]
    return [0, 1, 2], answer.output_text


def messages(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    tool = {"name": "run", "description": "Runs a command.", "input_schema": SCHEMA}
    conversation: list[Any] = [{"role": "user", "content": "What is in notes.txt?"}]
    caller = anthropic.Anthropic(base_url=door.root, api_key=door.key, max_retries=0, timeout=60)
    for _ in range(3):
        with caller.messages.stream(
            model="my-policy", max_tokens=500, messages=conversation, tools=cast(Any, [tool]), system="You are careful."
        ) as stream:
            answer = stream.get_final_message()
        conversation.append(
            {"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in answer.content]}
        )
        results = [
            {"type": "tool_result", "tool_use_id": part.id, "content": "3 lines"}
            for part in answer.content
            if part.type == "tool_use"
        ]
        if results:
            conversation.append({"role": "user", "content": results})
    return [0, 1, 2], "".join(part.text for part in answer.content if part.type == "text")


def gemini(door: Endpoint, engine: Engine) -> tuple[list[int], str]:
    caller = genai.Client(api_key=door.key, http_options=types.HttpOptions(base_url=door.root, timeout=60_000))
    declared = types.FunctionDeclaration(name="run", description="Runs a command.", parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text="What is in notes.txt?")])]
    text = ""
    for _ in range(3):
        parts: list[types.Part] = []
        text = ""
        for part_of in caller.models.generate_content_stream(model="my-policy", contents=contents, config=config):
            for candidate in part_of.candidates or []:
                parts += (candidate.content.parts or []) if candidate.content else []
        calls = [part for part in parts if part.function_call]
        text = "".join(part.text or "" for part in parts)
        contents.append(types.Content(role="model", parts=calls or [types.Part(text=text)]))
        results = [
            types.Part(
                function_response=types.FunctionResponse(
                    id=part.function_call.id, name="run", response={"output": "3 lines"}
                )
            )
            for part in calls
            if part.function_call
        ]
        if results:
            contents.append(types.Content(role="user", parts=results))
    return [0, 1, 2], text


SHAPES: dict[str, Shape] = {
    "streamed": streamed,
    "aborted": aborted,
    "n=2": two_choices,
    "retried after a 503": retried,
    "resampled": resampled,
    "two agents interleaved": interleaved,
    "sub-agent": sub_agent,
    "arguments rewritten": rewritten,
    "budget of two calls": budget,
    "Responses": responses,
    "Messages": messages,
    "Gemini": gemini,
}


def run(name: str, shape: Shape, engine: Engine, open_session: Callable[..., Endpoint]) -> str:
    """A table's row: what the agent saw, and what a trainer would get."""
    engine.sampled.clear()
    try:
        door = open_session(2) if shape is budget else open_session()
    except Exception as error:
        return f"| {name} | not offered: {str(error)[:80]} | |"
    try:
        wanted, seen = shape(door, engine)
    except Exception as error:
        wanted, seen = [], f"{type(error).__name__}: {str(error)[:160]}"
    verdict = judge(door.rows(), engine.sampled, wanted)
    return f"| {name} | {seen} | {verdict.words()} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="what to compare, by name, comma-separated")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="which conversations, by name, comma-separated")
    options = parser.parse_args()
    for target in options.targets.split(","):
        with Engine() as engine, tempfile.TemporaryDirectory() as folder:
            Agent(client(Endpoint(engine.base_url.removesuffix("/v1"), "warm-up", list))).turns(1)
            try:
                with TARGETS[target](engine, Path(folder)) as open_session:
                    print(f"\n{target}\n\n| conversation | the agent saw | a trainer gets |\n|---|---|---|", flush=True)
                    for name in options.shapes.split(","):
                        print(run(name, SHAPES[name], engine, open_session), flush=True)
            except Missing as reason:
                print(f"{target}: not measured: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
