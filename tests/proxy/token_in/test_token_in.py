"""Token-in through the proxy, against a double of vLLM with a real template and tokenizer (`template_engine`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import proxy.token_in.render
from capture.sequences.sequences import Turn, merge
from capture.sequences.threads import Threads
from proxy.errors import SettingsError
from proxy.token_in.call_history import CallHistory
from proxy.token_in.planner import TokenIn
from tests.chat_templates import encode
from tests.conversations import TOOLS
from tests.proxy.conftest import Bench, Started
from tests.proxy.fake_engine import FakeEngine
from tests.proxy.test_golden import EXAMPLES, steady
from tests.proxy.token_in.template_engine import TemplateEngine
from train.tokens.coverage import coverage

STOP = "<|im_end|>"


def tool_call(number: int) -> str:
    """As a model writes it: no space after the colons, which no template writes so; reasoning before, a space after."""
    arguments = json.dumps(
        {"cmd": f"sed -n {number}p notes.txt", "lines": [number, 1.5], "why": None}, separators=(",", ":")
    )
    return (
        f"<think>\nline {number} next\n</think>\n\nReading line {number}. \n"
        f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>{STOP}'
    )


class Client:
    """An agent that rebuilds messages: arguments are rewritten, spaces trimmed, reasoning dropped."""

    def __init__(self, bench: Bench, *, stream: bool = False, **more: Any) -> None:
        self.bench = bench
        self.stream = stream
        self.more = more
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You read files."},
            {"role": "user", "content": "Read notes.txt line by line."},
        ]

    async def ask(self) -> dict[str, Any]:
        body = {"model": "m", "messages": self.messages, "tools": TOOLS, "stream": self.stream, **self.more}
        answer = await self.bench.client.post("/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not self.stream:
            message: dict[str, Any] = answer.json()["choices"][0]["message"]
            return message
        message = {"role": "assistant"}
        for line in answer.text.split("\n\n"):
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    message |= {name: value for name, value in choice["delta"].items() if value}
        return message

    async def turn(self) -> None:
        message = await self.ask()
        back: dict[str, Any] = {"role": "assistant", "content": (message.get("content") or "").strip()}
        results: list[dict[str, Any]] = []
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(json.loads(call["function"]["arguments"]), indent=1, sort_keys=True)
            function = {"name": call["function"]["name"], "arguments": arguments}
            back.setdefault("tool_calls", []).append({"id": call["id"], "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": call["id"], "content": "a line of text\n"})
        self.messages += [back, *(results or [{"role": "user", "content": "Go on."}])]


def extending(bench: Bench) -> int:
    """How many calls continue another one, by their tokens alone."""
    threads = Threads()
    for call in bench.calls():
        assert call.capture is not None and call.capture.complete and call.capture.prompt_token_ids is not None
        threads.place(
            call.number,
            call.capture.prompt_token_ids,
            [completion.token_ids for completion in call.capture.completions if completion.token_ids is not None],
        )
    return sum(placement.parent is not None for placement in threads.placements.values())


def token_in(bench: Bench) -> TokenIn:
    planner = bench.proxy.sessions.default.token_in
    assert planner is not None
    return planner


def token_in_rows(bench: Bench) -> list[dict[str, Any]]:
    return [json.loads(line)["metadata"].get("token_in") for line in bench.journal.read_bytes().splitlines()]


@pytest.mark.parametrize(
    ("template", "stream", "turns"),
    [("qwen3_training", True, 20), ("qwen3_training", False, 5), ("qwen3", False, 5), ("qwen2_5", True, 5)],
)
async def test_turns_extend_regardless_of_what_the_client_rewrites(
    started: Started, template: str, stream: bool, turns: int
) -> None:
    double = TemplateEngine(template, [tool_call(n) for n in range(turns + 1)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench, stream=stream)
        for _ in range(turns + 1):
            await client.turn()
        rows = token_in_rows(bench)
        assert [row["bridged"] for row in rows] == [False, *[True] * turns]
        assert rows[0]["reason"] == "begins" and all(row["reason"] is None for row in rows[1:])
        assert [row["continues"] for row in rows[1:]] == list(range(turns))
        assert extending(bench) == turns
        assert [call.capture.prompt_token_ids for call in bench.calls() if call.capture] == double.prompts
        # The agent's conversation stands as it is in the record; ids stand in no request body.
        assert "kv_transfer_params" not in json.dumps(bench.calls()[-1].request_body)
        [report] = list(coverage(bench.journal))
        assert f"{turns}/{turns} prompts extend the previous call; {turns} calls bridged by token-in" in report.line
        assert report.summary["token_in"] == {"modes": ["auto"], "bridged": turns, "not_bridged": {"begins": 1}}
        for number in range(1, turns + 1):
            assert any(
                f"call {number} was bridged; re-rendered, it would have differed from call {number - 1} at token"
                in line
                and line.endswith("of its reply")
                for line in report.explained
            )
        sequence = merge(_turns(bench), _placements(bench))[0]
        assert sequence.sampled == sum(len(encode(tool_call(n))) for n in range(turns + 1))


@pytest.mark.parametrize(
    ("options", "policies"),
    [
        ({}, [("2", None), ("3", None)]),
        ({"model": "lora-v1"}, [("2", "lora-v2"), ("3", "lora-v3")]),
        ({"model": "first"}, [("2", "second"), ("3", "third")]),
        ({}, [("2", "second"), ("3", "third")]),
    ],
)
async def test_a_conversation_goes_on_when_the_policy_is_updated(
    started: Started, options: dict[str, Any], policies: list[tuple[str, str | None]]
) -> None:
    double = TemplateEngine("qwen3_training", [tool_call(n) for n in range(8)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto", **options) as bench:
        client = Client(bench)
        await client.turn()
        await client.turn()
        for version, model in policies:
            await bench.proxy.set_policy(version, model)
            await client.turn()
            await client.turn()
        rows = token_in_rows(bench)
        names = [call.metadata["provider_model"] for call in bench.calls()]
    first_renamed = next((at for at, name in enumerate(names) if name != names[0]), None)
    broken = {0} if options or first_renamed is None else {0, first_renamed}  # no name was known before
    assert {at for at, row in enumerate(rows) if not row["bridged"]} == broken


async def test_a_conversation_goes_on_with_the_next_version_of_an_adapter_that_the_agent_names(
    started: Started,
) -> None:
    double = TemplateEngine("qwen3_training", [tool_call(n) for n in range(4)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        for name in ("lora-v1", "lora-v2", "lora-v10"):
            client.more["model"] = name
            await client.turn()
        assert [row["bridged"] for row in token_in_rows(bench)] == [False, True, True]
        client.more["model"] = "other-v10"
        await client.turn()
        assert token_in_rows(bench)[-1]["reason"] == "options_changed"


@pytest.mark.parametrize("template", ["qwen3_training", "qwen2_5"])
async def test_without_token_in_the_same_conversation_breaks(started: Started, template: str) -> None:
    double = TemplateEngine(template, [tool_call(n) for n in range(6)])
    async with FakeEngine(double.answer()) as engine, started(engine.url) as bench:
        client = Client(bench)
        for _ in range(6):
            await client.turn()
        assert extending(bench) == 0
        assert token_in_rows(bench) == [None] * 6
        assert not any(call.path in ("/tokenize", "/detokenize") for call in engine.calls)


def _turns(bench: Bench) -> list[Turn]:
    made = []
    for call in bench.calls():
        assert call.capture is not None and call.capture.prompt_token_ids is not None
        made.append(Turn(call.number, call.line, call.capture.prompt_token_ids, call.capture.completions))
    return made


def _placements(bench: Bench) -> Any:
    threads = Threads()
    for turn in _turns(bench):
        threads.place(
            turn.call, turn.prompt, [choice.token_ids for choice in turn.choices if choice.token_ids is not None]
        )
    return threads.placements


async def test_a_cut_reply_is_closed_by_tokens_that_are_not_trained_on(started: Started) -> None:
    cut = encode("The notes begin with a lo")
    double = TemplateEngine("qwen2_5", [cut, "Yes." + STOP, "Done." + STOP])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        for _ in range(3):
            await client.turn()
        assert [row["bridged"] for row in token_in_rows(bench)] == [False, True, True]
        assert [row.get("closing_ids") for row in token_in_rows(bench)] == [None, 2, 0]
        closing = encode(STOP + "\n")
        expected = double.prompts[0] + cut
        assert double.prompts[1][: len(expected) + 2] == expected + closing
        [sequence] = merge(_turns(bench), _placements(bench))
        ids, mask = sequence.completion_ids.tolist(), sequence.completion_mask
        assert [token for token, trained in zip(ids, mask, strict=True) if trained] == [
            *cut, *encode("Yes." + STOP), *encode("Done." + STOP)
        ]  # fmt: skip
        assert mask[: len(cut) + 2] == [1] * len(cut) + [0, 0]
        assert len(sequence.logprobs) == sequence.sampled


async def test_a_changed_conversation_is_sent_as_it_is_and_says_why(started: Started) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(8)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        await client.turn()
        messages = list(client.messages)
        await client.turn()
        client.messages = [{**messages[0], "content": "You write files."}, *messages[1:]]
        await client.turn()
        client.messages = [*messages[:1], {"role": "user", "content": "Another question."}, *messages[2:]]
        await client.turn()
        client.messages, client.more = messages, {"tools": TOOLS[:1]}
        await client.turn()
        client.messages, client.more = [messages[0], {"role": "user", "content": "Summary: line 0 was read."}], {}
        await client.turn()
        rows = token_in_rows(bench)
        assert [row["reason"] for row in rows] == [
            "begins", None, "system_changed", "history_edited", "tools_changed", "begins"
        ]  # fmt: skip
        assert double.given == [False, True, False, False, False, False]
        [report] = list(coverage(bench.journal))
        assert any("call 3 was not bridged: the agent changed earlier messages" in line for line in report.explained)
        state = await bench.proxy.session_state("default")
        assert state["token_in"]["bridged"] == 1


async def test_what_the_proxy_writes_of_a_bridged_call_is_the_golden_line(started: Started) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(0), "Done." + STOP])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        await client.turn()
        await client.turn()
        line = json.loads(bench.journal.read_bytes().splitlines()[1])
    path = EXAMPLES / "token_in.json"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(json.dumps(line, indent=1) + "\n")
    assert steady(line) == steady(json.loads(path.read_text()))
    assert line["metadata"]["token_in"]["rendered_prompt_token_ids"] != double.prompts[1]


async def test_branches_of_one_conversation_are_both_bridged(started: Started) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(0), "One." + STOP, "Two." + STOP, "Three." + STOP])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        await client.turn()
        fork = list(client.messages)
        await client.turn()
        client.messages = [*fork[:-1], {**fork[-1], "content": "another line"}]
        await client.turn()
        await client.turn()
        assert [row.get("continues") for row in token_in_rows(bench)] == [None, 0, 0, 2]


async def test_a_translated_dialect_is_bridged_like_any_chat(started: Started) -> None:
    double = TemplateEngine("qwen2_5", [f"Line {n} says  so. " + STOP for n in range(4)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Read line by line."}]
        for _ in range(4):
            body = {"model": "m", "system": "Be brief.", "messages": messages, "max_tokens": 50}
            answer = await bench.client.post("/messages", json=body)
            assert answer.status_code == 200, answer.text
            text = "".join(block.get("text", "") for block in answer.json()["content"])
            messages += [
                {"role": "assistant", "content": [{"type": "text", "text": text.strip()}]},
                {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
            ]
        assert [row["bridged"] for row in token_in_rows(bench)] == [False, True, True, True]
        assert extending(bench) == 3


@pytest.mark.parametrize("engine_id", [None, "", "call_0"])
async def test_calls_whose_ids_the_proxy_made_are_bridged(started: Started, engine_id: str | None) -> None:
    """The engine leaves ids out, or gives the same in every turn; the agent gets ids of its own for them."""
    double = TemplateEngine("qwen2_5", [*(tool_call(n) for n in range(3)), f"Done. {STOP}"], call_id=engine_id)
    tools = [{"name": "run", "input_schema": {"type": "object"}}]
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Read line by line."}]
        for _ in range(3):
            body = {"model": "m", "messages": messages, "max_tokens": 50, "tools": tools}
            answer = await bench.client.post("/messages", json=body)
            assert answer.status_code == 200, answer.text
            content = answer.json()["content"]
            [call] = [block for block in content if block["type"] == "tool_use"]
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "a line"}
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        assert [row["bridged"] for row in token_in_rows(bench)] == [False, True, True], token_in_rows(bench)


async def test_a_rewritten_older_message_delays_the_proof_by_one_call(started: Started) -> None:
    """What /tokenize renders is held to the ids of a call whose messages are the same to the letter, or of this one."""
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(3)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        await client.turn()
        client.messages[1] = {"role": "user", "content": [{"type": "text", "text": "Read notes.txt line by line. "}]}
        await client.turn()
        await client.turn()
        assert [row["reason"] for row in token_in_rows(bench)] == ["begins", "unproved", None]


async def test_required_and_not_to_be_had_is_refused_before_anything_is_sent(started: Started) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(3)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="require") as bench:
        client = Client(bench)
        await client.turn()
        await client.turn()
        edited = [*client.messages]
        edited[2] = {**edited[2], "content": "I read nothing."}
        answer = await bench.client.post("/chat/completions", json={"model": "m", "messages": edited, "tools": TOOLS})
        assert answer.status_code == 422
        assert (
            "token-in is required, and this call cannot be bridged: the agent changed"
            in answer.json()["error"]["message"]
        )
        assert len(double.prompts) == 2
        call = bench.calls()[-1]
        assert (call.outcome, call.status_code) == ("error", 422)
        assert call.capture is not None
        assert {why.code for why in call.capture.unavailable.values()} == {"refused_by_proxy"}
        assert token_in_rows(bench)[-1]["reason"] == "history_edited"
        await client.turn()
        assert token_in_rows(bench)[-1]["bridged"] is True


async def test_an_engine_that_takes_no_prompt_ids_says_so(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(0)] * 3)
    async with FakeEngine(double.answer(), engine="vllm") as engine:
        async with started(engine.url, token_in="auto", engine="llamacpp") as bench:
            answer = await bench.client.post(
                "/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "x"}]}
            )
            assert answer.status_code == 200
            assert token_in_rows(bench) == [
                {
                    "mode": "auto",
                    "bridged": False,
                    "reason": "engine_cannot",
                    "detail": "this engine takes no prompt ids on its chat route; vLLM and SGLang do",
                }
            ]
            assert "no token-in: this engine takes no prompt ids" in caplog.text


async def test_an_engine_that_ignores_the_ids_is_found_out(started: Started) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(4)])
    double.ignores_prompts = True
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        for _ in range(4):
            await client.turn()
        rows = token_in_rows(bench)
        assert [row["reason"] for row in rows] == ["begins", "prompt_not_used", "turned_off", "turned_off"]
        assert not any(row["bridged"] for row in rows)
        assert "used other prompt ids" in rows[3]["detail"]
        assert double.given == [False, True, False, False]


@pytest.mark.parametrize(
    ("failure", "reasons", "detail"),
    [
        ("refuses_prompts", ["begins", "engine_refused", "engine_refused"], "kv_transfer_params: not here"),
        ("no_tokenizer", ["begins", "no_rendering", "no_rendering"], "/tokenize did not answer"),
        ("renders_otherwise", ["begins", "rendering_differs", "turned_off"], "does not render as its chat route does"),
    ],
)
async def test_an_engine_that_cannot_do_its_part_loses_only_the_bridge(
    started: Started, failure: str, reasons: list[str], detail: str
) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(3)])
    assert getattr(double, failure) is False
    setattr(double, failure, True)
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        for _ in range(3):
            await client.turn()
        rows = token_in_rows(bench)
        assert [row["reason"] for row in rows] == reasons
        assert detail in rows[1]["detail"]
        assert all(call.capture is not None and call.capture.complete for call in bench.calls())
        off = (await bench.proxy.session_state("default"))["token_in"]["turned_off"]
        assert (off is not None and detail in off) == ("turned_off" in reasons)


async def test_a_prompt_that_would_read_differently_is_not_sent(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault anywhere in the bridge is caught by reading the whole prompt beside the rendering."""
    from capture.token_in import bridge as rules

    real = rules.bridge

    def faulty(*args: Any, **more: Any) -> Any:
        made = real(*args, **more)
        if isinstance(made, rules.Bridge):
            object.__setattr__(made, "prompt", rules.Ids.of(made.prompt.tolist()[:-1] + encode("word")))
        return made

    monkeypatch.setattr(proxy.token_in.render, "bridge", faulty)
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(3)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        for _ in range(3):
            await client.turn()
        assert [row["reason"] for row in token_in_rows(bench)] == ["begins", "prompt_reads_otherwise", "turned_off"]
        assert double.given == [False, False, False]


async def test_a_bug_in_the_proxy_loses_only_the_bridge(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(proxy.token_in.render, "bridge", broken)
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(2)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        await client.turn()
        await client.turn()
        assert token_in_rows(bench)[1]["reason"] == "failed"
        assert "ZeroDivisionError" in token_in_rows(bench)[1]["detail"]


async def test_old_calls_make_room_and_are_not_mistaken_for_new_conversations(started: Started) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(2)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        token_in(bench).history = CallHistory(memory=1)
        client = Client(bench)
        await client.turn()
        await client.turn()
        assert token_in_rows(bench)[1]["reason"] == "parent_forgotten"


async def test_sessions_share_nothing(started: Started, tmp_path: Path) -> None:
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(3)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        client = Client(bench)
        await client.turn()
        other = await bench.proxy.open_session("other", journal=tmp_path / "other.jsonl", token_in="auto")
        body = {"model": "m", "messages": client.messages, "tools": TOOLS}
        answer = await bench.client.post(
            "/chat/completions", json=body, headers={"authorization": f"Bearer {other.api_key}"}
        )
        assert answer.status_code == 200
        line = json.loads((tmp_path / "other.jsonl").read_bytes())
        assert line["metadata"]["token_in"]["reason"] == "begins"


async def test_a_session_may_ask_for_it_and_must_capture(started: Started, tmp_path: Path) -> None:
    double = TemplateEngine("qwen2_5", [])
    async with FakeEngine(double.answer()) as engine, started(engine.url) as bench:
        await bench.proxy.open_session("a", journal=tmp_path / "a.jsonl", token_in="require")
        assert (await bench.proxy.session_state("a"))["token_in"]["mode"] == "require"
        assert (await bench.proxy.session_state("default"))["token_in"] is None
        with pytest.raises(SettingsError, match="--token-in must be one of off, auto, require"):
            await bench.proxy.open_session("b", journal=tmp_path / "b.jsonl", token_in="on")
        with pytest.raises(SettingsError, match="needs the captured ids"):
            await bench.proxy.open_session("c", journal=tmp_path / "c.jsonl", token_in="auto", capture=False)


async def test_most_calls_ask_for_one_rendering(started: Started) -> None:
    """What a template was seen to do once is not asked for again, but for one call in sixteen."""
    double = TemplateEngine("qwen2_5", [tool_call(n).partition("</think>\n\n")[2] for n in range(9)])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        token_in(bench).audit_every = 10**9
        client = Client(bench)
        for _ in range(9):
            await client.turn()
        assert [row["bridged"] for row in token_in_rows(bench)] == [False, *[True] * 8]
        asked = [call.path for call in engine.calls if call.path == "/tokenize"]
        assert len(asked) == 3 + 7


async def test_a_reply_that_writes_a_stop_tokens_name_is_bridged_anyway(started: Started) -> None:
    """Its text is a stop token to the template's tokenizer, and was plain letters when it was sampled."""
    letters = [token for letter in f"Turns end with {STOP} here." for token in encode(letter)] + encode(STOP)
    double = TemplateEngine("qwen2_5", ["One." + STOP, "Two." + STOP, letters, "Four." + STOP])
    async with FakeEngine(double.answer()) as engine, started(engine.url, token_in="auto") as bench:
        token_in(bench).audit_every = 10**9
        client = Client(bench)
        for _ in range(4):
            await client.turn()
        assert [row["bridged"] for row in token_in_rows(bench)] == [False, True, True, True]
        assert extending(bench) == 3


@pytest.mark.parametrize("mode", ["auto", "require"])
async def test_a_reopened_session_says_so_and_bridges_from_there_on(started: Started, mode: str) -> None:
    """The proxy was started again on the same journal, or an address made its session once more."""
    double = TemplateEngine("qwen2_5", [tool_call(n) for n in range(4)])
    async with FakeEngine(double.answer()) as engine:
        async with started(engine.url, token_in=mode) as bench:
            client = Client(bench)
            await client.turn()
        async with started(engine.url, token_in=mode) as bench:
            client.bench = bench
            if mode == "require":
                body = {"model": "m", "messages": client.messages, "tools": TOOLS}
                refused = await bench.client.post("/chat/completions", json=body)
                assert refused.status_code == 422 and "opened_again" in refused.text and "new journal" in refused.text
                await Client(bench).turn()  # a conversation of its own begins as ever
                assert [row["reason"] for row in token_in_rows(bench)] == ["begins", "opened_again", "begins"]
                return
            await client.turn()
            await client.turn()
            assert [row["reason"] for row in token_in_rows(bench)] == ["begins", "opened_again", None]
