"""Every agent for real, in containers: against the scripted engine, then against a real model that can do little.

The scripted engine is a test double; what is real here is the agent, its settings, its dialect, the proxy, the records.
Three of the agents run in `tests/sandbox/agents/test_agents.py` too. About a minute an agent, the installing included.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest

from proxy import SessionOptions
from sandbox.agents import find_agent
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.rollouts.model_endpoint import Provider
from sandbox.tasks.task import load_task
from tests.sandbox.agent_runs import TASK, check_whole, read_back, scripted
from tests.sandbox.scripted_engine import Body, Rewrite, Said, call_shell, side_answer
from tests.sandbox.support import attempt

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("docker_client"), pytest.mark.timeout(900)]

#: The agent -> calls beside its own (a title), and its tool calls: mini-swe-agent ends by one.
AGENTS = {
    "claude": (1, 2), "codex": (0, 2), "opencode": (1, 2), "qwen-code": (0, 2), "mini-swe-agent": (0, 3), "pi": (0, 2),
    "gemini": (0, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", AGENTS)
def test_each_agent_leaves_a_training_grade_rollout(tmp_path: Path, name: str) -> None:
    """Where nothing but the proxy can be reached: no agent may need anything else once it is installed."""
    side_calls, tool_calls = AGENTS[name]
    check_whole(scripted(tmp_path, name, network="no-network"), side_calls=side_calls, tool_calls=tool_calls)


@pytest.mark.parametrize("name", AGENTS)
def test_each_agent_ends_cleanly_with_a_small_model(tmp_path: Path, engine: EmbeddedEngine, name: str) -> None:
    """4096 tokens are less than some agents take for themselves: a refusal in the agent's dialect is then its end."""
    provider = Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, None, True)
    environment = {"BENCHFLOW_CONTEXT_WINDOW": "4096"}
    seen = attempt(tmp_path, load_task(TASK), find_agent(name), provider=provider, timeout=240.0, agent_env=environment)
    result, run = seen.result, read_back(seen, [])
    print(name, result["stop_reason"], result["error_category"], result["error"], run.covered.line)
    assert seen.reward in (0.0, 1.0) and result["verifier_error"] is None
    assert run.calls, "it never came to its model"
    assert result["error_category"] in (None, "provider_rejected", "timeout"), result["error"]
    for call in run.calls:
        assert call.outcome in ("ok", "error", "aborted"), call.outcome  # a title may be left when the turn is over
        if call.outcome == "error":
            assert call.status_code == 400 and "context" in str(call.response_body).lower()


@pytest.mark.parametrize("name", ["mini", *AGENTS])
def test_each_agent_stops_at_once_when_its_budget_is_used_up(tmp_path: Path, name: str) -> None:
    """After its first call it gets a closing message, and calls no more but for a title or the like."""
    side_calls = AGENTS.get(name, (0, 0))[0]
    run = scripted(tmp_path, name, session=SessionOptions(max_calls=1 + side_calls))
    result, outcomes = run.seen.result, [call.outcome for call in run.calls]
    print(name, outcomes, [call.metadata.get("ended") for call in run.calls], result["timing"], result["error"])
    assert outcomes.count("ok") == 1 + side_calls and outcomes.count("ended") >= 1
    assert len(outcomes) <= 2 + side_calls + MOST_AFTER_THE_END.get(name, 0), outcomes
    assert result["error"] is None and result["stop_reason"] == "budget_reached", result
    assert result["budget"]["reached"] == "max_calls" and run.seen.reward is not None
    assert run.covered.training_grade and "ended by its budget" in run.covered.line, run.explained()


#: Further calls that an agent makes after the closing message.
MOST_AFTER_THE_END = {"mini-swe-agent": 2}  # it asks three times for a command before it ends


def shell_twice(body: Body) -> Said:
    """Two turns of two commands each, then a look at what they wrote. Each command adds to a file, so that one that
    ran twice, or with other arguments, shows."""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or []}
    if not tools:
        return Said(side_answer(body))
    turns = [
        ("printf 4 >> /app/answer.txt", "printf a >> /app/other.txt"),
        ("printf 2 >> /app/answer.txt", "printf 'b}' >> /app/other.txt"),
        ("cat /app/answer.txt", "cat /app/other.txt"),
    ]
    done = sum(message["role"] == "tool" for message in body["messages"]) // 2
    if done >= len(turns):
        return Said("Done: /app/answer.txt holds 42.")
    first, second = (run_command(tools, command) for command in turns[done])
    return replace(first, others=(second,))


def run_command(tools: dict[str, Body], command: str) -> Said:
    """Codex gives models that it knows one tool, which takes JavaScript that calls the others."""
    if "functions__exec" in tools:
        call = f"await tools.exec_command({json.dumps({'cmd': command})})"
        return Said(tool="functions__exec", arguments={"input": f"text({call})"})
    return call_shell(tools, command)


def alternating(fragments: list[list[Body]]) -> None:
    """The fragments of both calls in turn."""
    flat = [fragment for some in fragments for fragment in some]
    first, second = ([event for event in flat if event["index"] == index] for index in (0, 1))
    mixed = [event for pair in zip_longest(first, second) for event in pair if event is not None]
    for some in fragments:
        some[:] = [mixed.pop(0) for _ in some]


def without_ids(fragments: list[list[Body]]) -> None:
    for some in fragments:
        for fragment in some:
            if "id" in fragment:
                fragment["id"] = ""


def all_index_0(fragments: list[list[Body]]) -> None:
    """One index for all calls, and the same ids in every turn."""
    for some in fragments:
        for fragment in some:
            if "id" in fragment:
                fragment["id"] = f"call_{fragment['index']}"
            fragment["index"] = 0


@pytest.mark.parametrize("rewrite", [alternating, without_ids, all_index_0])
@pytest.mark.parametrize(
    ("name", "model"),
    [("claude", "my-policy"), ("claude", "claude-sonnet-4-5"), ("codex", "my-policy"), ("codex", "gpt-5.6-sol")],
)
def test_several_calls_in_one_answer_run_once_each(tmp_path: Path, name: str, model: str, rewrite: Rewrite) -> None:
    """A model name that the agent knows changes what it sends: tools as items, other fields."""
    run = scripted(tmp_path, name, shell_twice, model=model, rewrite=rewrite)
    assert run.seen.result["error"] is None and run.seen.reward == 1.0, run.seen.result
    assert run.seen.result["n_tool_calls"] == 6
    messages = run.sent[-1]["messages"]
    results = {message["tool_call_id"]: str(message["content"]) for message in messages if message["role"] == "tool"}
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    assert [call["id"] for call in calls] == list(dict.fromkeys(call["id"] for call in calls)) and len(results) == 6
    looks = [results[call["id"]] for call in calls[4:]]  # Claude Code sends results in the order in which they came
    assert "42" in looks[0] and "ab}" in looks[1], looks
    assert all(call.outcome == "ok" and call.capture is not None and call.capture.complete for call in run.calls)
    assert run.covered.training_grade and "3/3 prompts extend" in run.covered.line, run.explained()


ORDER = "Write 42 to /app/answer.txt with one command."
#: The tool that starts a sub-agent -> the kind of sub-agent.
DELEGATES = {"task": "general", "Agent": "general-purpose", "agent": "general-purpose"}


def delegate(body: Body) -> Said:
    """The agent sends a sub-agent, which writes the number, then looks at it and says so."""
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or []}
    if not tools:
        return Said(side_answer(body))
    done = sum(message["role"] == "tool" for message in body["messages"])
    if any(message["role"] == "user" and ORDER in str(message["content"]) for message in body["messages"]):
        return Said("The number is written.") if done else call_shell(tools, "printf 42 > /app/answer.txt")
    if done == 0:
        name = next(name for name in DELEGATES if name in tools)
        asked = {"description": "Write it", "prompt": ORDER, "subagent_type": DELEGATES[name]}
        if "run_in_background" in str(tools[name]["parameters"]):
            asked["run_in_background"] = False  # type: ignore[assignment]
        return Said(tool=name, arguments=asked)
    return call_shell(tools, "cat /app/answer.txt") if done == 1 else Said("Done.")


@pytest.mark.parametrize("name", ["claude", "opencode", "qwen-code"])
def test_a_sub_agent_has_a_thread_of_its_own_kind(tmp_path: Path, name: str) -> None:
    run = scripted(tmp_path, name, delegate, CLAUDE_TOOLS="Bash,Read,Write,Task")
    assert run.seen.result["error"] is None and run.seen.reward == 1.0, run.seen.result
    kinds = [call.purpose for call in run.calls]
    assert kinds.count("agent") == 3 and kinds.count("subagent") == 2, kinds
    assert run.covered.training_grade, run.explained()
