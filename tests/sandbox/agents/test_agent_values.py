"""What an agent reports may be any JSON: its rollout may fail, the job continues, and what is stored is strict JSON."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import orjson
import pytest

from capture.command.terminal import printable
from sandbox.agents import Agent, AgentRun, acp
from sandbox.agents.mini_swe import add_transcript
from sandbox.agents.trajectory import Trajectory
from sandbox.containers.base import STDOUT
from sandbox.containers.local import LocalPool
from sandbox.errors import VerifierError
from sandbox.rollouts.job import JobOptions, run_job
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.scoring.verifier import copy_files, read_reward
from tests.sandbox.support import make_task

UPDATE = '{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":%s}}'
CALL = '{"sessionUpdate":"tool_call","toolCallId":"a","status":"completed",%s}'
DEEP = "[" * 600 + "]" * 600
#: What the agent writes between its prompt and its answer.
LINES = {
    "half an emoji as text": UPDATE % r'{"sessionUpdate":"agent_message_chunk","content":{"text":"\ud83d"}}',
    "half an emoji as a key": UPDATE % (CALL % r'"rawInput":{"\ude00":1}'),
    "half an emoji as a title": UPDATE % (CALL % r'"title":"\ud83d"'),
    "a list as the status": UPDATE % '{"sessionUpdate":"tool_call","toolCallId":"a","status":["x"]}',
    "an object as the id": UPDATE % '{"sessionUpdate":"tool_call","toolCallId":{"a":[1]},"status":"failed"}',
    "numbers as kind and title": UPDATE % (CALL % '"kind":7,"title":{"a":1}'),
    "an integer beyond 64 bits": UPDATE % (CALL % f'"rawOutput":{10**30}'),
    "an integer of 5,000 digits": UPDATE % (CALL % f'"rawOutput":{"9" * 5000}'),
    "NaN": UPDATE % (CALL % '"rawOutput":NaN'),
    "600 levels of lists": UPDATE % (CALL % f'"content":{DEEP}'),
    "100,000 levels of lists": UPDATE % (CALL % ('"content":' + "[" * 100_000 + "]" * 100_000)),
    "a list as the update": UPDATE % "[1]",
    "a list as the content": UPDATE % '{"sessionUpdate":"agent_message_chunk","content":["x"]}',
    "a text as the parameters": '{"jsonrpc":"2.0","method":"session/update","params":"x"}',
    "a number as the method": '{"jsonrpc":"2.0","method":5,"params":{}}',
    "a list as a message's id": '{"jsonrpc":"2.0","id":[1],"result":{}}',
    "a text as an error": '{"jsonrpc":"2.0","id":99,"error":"x"}',
    "texts as permission options": (
        '{"jsonrpc":"2.0","id":7,"method":"session/request_permission","params":{"options":["x"]}}'
    ),
}
ANSWERS = {
    "initialize": '{"protocolVersion":1,"agentInfo":["evil"]}',
    "session/new": '{"sessionId":"s","models":["x"]}',
    "session/prompt": r'{"stopReason":["\ud83d"]}',
}


class LinePipe:
    """A double for an agent's streams: answers each request, and writes `line` before the answer to the prompt."""

    def __init__(self, line: str) -> None:
        self._line, self._output, self._ready = line, b"", threading.Condition()
        self._closed = False

    def write(self, data: bytes) -> None:
        message = json.loads(data)
        if "method" not in message:
            return
        extra = f"{self._line}\n" if message["method"] == "session/prompt" else ""
        answer = f'{{"jsonrpc":"2.0","id":{message["id"]},"result":{ANSWERS[message["method"]]}}}\n'
        with self._ready:
            self._output += (extra + answer).encode()
            self._ready.notify_all()

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        with self._ready:
            if not self._ready.wait_for(lambda: self._output or self._closed, timeout):
                raise TimeoutError
            output, self._output = self._output, b""
            return (STDOUT, output) if output else None

    def close_stdin(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def close(self) -> None:
        self.close_stdin()

    def exit_code(self) -> int:
        return 0


class StrangeAgent(Agent):
    """A double: the agent of the first task reports `line`, the other does its work."""

    name, needs_model = "strange", False

    def __init__(self, line: str) -> None:
        self.line = line

    def act(self, agent_run: AgentRun) -> str:
        if agent_run.task.name == "first":
            return acp.converse(agent_run, LinePipe(self.line), name=self.name)
        agent_run.begin()
        return "end_turn"


@pytest.mark.parametrize("kind", LINES)
def test_an_unexpected_value_ends_no_job_and_is_stored_as_strict_json(tmp_path: Path, kind: str) -> None:
    tasks = [make_task(tmp_path, name=name, agent="timeout_sec: 60") for name in ("first", "second")]
    plan = RolloutPlan(job="job", agent=StrangeAgent(LINES[kind]), provider=None)
    options = JobOptions(jobs_dir=tmp_path / "jobs", concurrency=1)
    ended = run_job(plan, tasks, options, Progress(io.StringIO(), live=False), make_pool=LocalPool)
    results = {path.parent.name.partition("__")[0]: path for path in (tmp_path / "jobs/job").glob("*/result.json")}
    assert set(results) == {"first", "second"} and ended.summaries[0]["total"] == 2
    first = orjson.loads(results["first"].read_bytes())
    assert first["error"] is None and first["rewards"] == {"reward": 0.0} and first["stop_reason"] == "end_turn"
    for path in (tmp_path / "jobs").rglob("*.json*"):
        for line in path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]:
            orjson.loads(line)


def test_the_environment_of_a_local_job_is_local(tmp_path: Path) -> None:
    plan = RolloutPlan(job="job", agent=StrangeAgent(""), provider=None)
    options, progress = JobOptions(jobs_dir=tmp_path / "jobs"), Progress(io.StringIO(), live=False)
    run_job(plan, [make_task(tmp_path, name="second")], options, progress, make_pool=LocalPool)
    job = tmp_path / "jobs/job"
    files = [job / "evaluation.json", job / "summary.json", next(job.glob("*/config.json"))]
    assert [json.loads(path.read_text())["environment"] for path in files] == ["local"] * 3
    assert json.loads(next(job.glob("*/result.json")).read_text())["sandbox"] == "local"


@pytest.mark.parametrize(
    "transcript",
    [
        {"messages": [{"role": "assistant", "content": ["x"], "tool_calls": [7, {"id": 1, "function": "f"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": ["a"], "function": {"name": {}, "arguments": 5}}]}]},
        {"messages": {"role": "assistant"}},
        {"messages": [{"role": "tool", "tool_call_id": None, "content": "\ud83d", "extra": ["x"]}]},
    ],
)
def test_an_unexpected_transcript_is_read_as_far_as_it_makes_sense(
    tmp_path: Path, transcript: dict[str, object]
) -> None:
    trajectory = Trajectory(tmp_path / "t.jsonl")
    add_transcript(trajectory, transcript)
    trajectory.save(now=True)
    assert all(orjson.loads(line) for line in (tmp_path / "t.jsonl").read_bytes().splitlines())


@pytest.mark.parametrize(
    "reward",
    ["1" + "0" * 400, "[" * 100_000, '{"reward": %s}' % ("9" * 400), '{"reward": 1, "extra": %s}' % ("9" * 400),
     '{"reward": true}', '{"reward": "1"}', '{"reward": 1e999}'],
)  # fmt: skip
def test_an_unexpected_reward_is_refused_in_words(reward: str) -> None:
    with pytest.raises(VerifierError, match=r"reward\.json"):
        read_reward({"reward.json": reward.encode()}, [0.0, 1.0])


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("end\x1b[2Jturn", "end\\x1b[2Jturn"),
        ("a\r\n[PASS] forged", "a\\r\\n[PASS] forged"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil", "\\u202eevil"),
        ("half \ud83d", "half \\ud83d"),
        ("→ ünïcode 日本", "→ ünïcode 日本"),
    ],
)
def test_what_a_terminal_would_act_on_is_escaped(text: str, printed: str) -> None:
    out = io.StringIO()
    Progress(out, live=False).line(text)
    assert out.getvalue() == f"{printed}\n" and printable(text) == printed


@pytest.mark.parametrize("name", ["x" * 255, "x" * 256, "a/" * 3000 + "f", "nul\0", "a/b/c", "\udcff"])
def test_a_log_of_any_name_is_copied_or_left_out(tmp_path: Path, name: str) -> None:
    left_out = copy_files([(name, b"1"), ("other", b"2")], tmp_path)
    assert (tmp_path / "other").read_bytes() == b"2"
    assert left_out == (0 if len(name) < 256 and "\0" not in name else 1)


def test_logs_beyond_the_limit_are_left_out(tmp_path: Path) -> None:
    assert copy_files(((str(number), b"") for number in range(12)), tmp_path, most=10) == 2
    assert len(list(tmp_path.iterdir())) == 10
