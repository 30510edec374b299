"""The Agent Client Protocol: a recorded conversation of pi-acp 0.0.24, and agents that misbehave in real containers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from sandbox.agents import Agent, AgentRun, acp
from sandbox.agents.trajectory import Trajectory
from sandbox.containers.archives import file_archive
from sandbox.containers.base import STDOUT, Sandbox, run
from sandbox.errors import AgentError
from sandbox.scoring.hardening import SAFE_PATH, Prepared, Scan
from tests.sandbox.support import Seen, attempt, make_task

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "piacp.json").read_text())


class RecordedAgent:
    """A double for a running pi-acp: answers each request with what the real one said next, word for word."""

    def __init__(self, cut: int | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self._said: list[bytes] = []
        self._more = threading.Condition()
        self._rest = [row for row in RECORDED if row["dir"] in ("client->agent", "agent->client")]
        self._cut = cut
        self._closed = False

    def write(self, data: bytes) -> None:
        """Releases what followed the matching request in the recording; ids are the client's own."""
        message = json.loads(data)
        self.asked.append(message)
        while self._rest and self._rest[0]["dir"] == "client->agent":
            recorded = self._rest.pop(0)["msg"]
            assert recorded["method"] == message["method"]
        with self._more:
            while self._rest and self._rest[0]["dir"] == "agent->client":
                answer = dict(self._rest.pop(0)["msg"])
                if "id" in answer and "method" not in answer:
                    answer["id"] = message["id"]
                self._said.append(json.dumps(answer).encode() + b"\n")
            self._more.notify_all()

    def read(self, timeout: float) -> tuple[int, bytes] | None:
        """Lines in pieces of seven bytes, as frames that do not align to lines."""
        with self._more:
            if not self._said:
                self._more.wait(timeout)
            if self._closed:
                return None
            if not self._said:
                raise TimeoutError
            line = self._said.pop(0)
            piece, rest = line[:7], line[7:]
            if rest:
                self._said.insert(0, rest)
            return STDOUT, piece

    def close_stdin(self) -> None:
        with self._more:
            self._closed = True
            self._more.notify_all()

    def close(self) -> None:
        self.close_stdin()

    def exit_code(self) -> int:
        return 0


class NoBox:
    """A double for a sandbox in which nothing is ever asked for."""

    def cause_of_death(self, exit_code: int | None) -> None:
        return None


def agent_run_of(tmp_path: Path, budget: float = 30.0, sandbox: Any = None) -> AgentRun:
    prepared = Prepared("agent", "/home/agent", "/app", SAFE_PATH, Scan(), {})
    trajectory = Trajectory(tmp_path / "acp_trajectory.jsonl")
    task = make_task(tmp_path)
    return AgentRun(
        sandbox or NoBox(), task, prepared, "write 42 to answer.txt", None, {}, trajectory, tmp_path / "agent", budget
    )


def test_the_recorded_conversation_becomes_a_trajectory(tmp_path: Path) -> None:
    agent, agent_run = RecordedAgent(), agent_run_of(tmp_path)
    assert acp.converse(agent_run, agent, name="pi-acp", model_id="capture/my-policy") == "end_turn"
    agent_run.trajectory.save(now=True)
    events = [json.loads(line) for line in (tmp_path / "acp_trajectory.jsonl").read_text().splitlines()]
    assert [event["type"] for event in events] == ["user_message", "tool_call", "agent_message"]
    call = events[1]
    assert (call["title"], call["status"], call["tool_call_id"]) == ("bash", "completed", "call_mock1")
    assert call["raw_input"] == {"command": "printf 42 > answer.txt"}
    assert call["content"][0]["content"]["text"] == "(no output)"
    assert events[2]["text"].startswith("Done: ")
    assert agent_run.reported_name == "pi-acp" and agent_run.trajectory.tool_calls == 1


def test_what_we_ask_is_what_the_recording_asked(tmp_path: Path) -> None:
    agent = RecordedAgent()
    acp.converse(agent_run_of(tmp_path), agent, name="pi-acp")
    assert [m["method"] for m in agent.asked] == ["initialize", "session/new", "session/prompt"]
    first, new, prompt = (m["params"] for m in agent.asked)
    assert first["clientCapabilities"] == {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}
    assert new == {"cwd": "/app", "mcpServers": []}
    assert prompt["prompt"] == [{"type": "text", "text": "write 42 to answer.txt"}]


def test_a_model_that_is_not_the_current_one_is_set(tmp_path: Path) -> None:
    asked = []

    class Stops(RecordedAgent):
        def write(self, data: bytes) -> None:
            asked.append(json.loads(data))
            if asked[-1]["method"] == "session/set_model":
                raise BrokenPipeError
            super().write(data)

    with pytest.raises(AgentError):
        acp.converse(agent_run_of(tmp_path), Stops(), name="pi-acp", model_id="benchflow/other")
    assert asked[-1]["params"]["modelId"] == "benchflow/other"


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ([("a", "allow_once"), ("b", "allow_always"), ("c", "reject_once")], "b"),
        ([("a", "reject_once"), ("b", "allow_once")], "b"),
        ([("bypassPermissions", "other"), ("b", "allow_always")], "bypassPermissions"),
        ([("only", "something")], "only"),
    ],
)
def test_permission_is_given(options: list[tuple[str, str]], chosen: str) -> None:
    answer = acp.permission([{"optionId": name, "kind": kind} for name, kind in options])
    assert answer == {"outcome": {"outcome": "selected", "optionId": chosen}}


FAKE = """import json, os, sys, time
def say(**message): sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n"); sys.stdout.flush()
def update(**fields): say(method="session/update", params={"sessionId": "s", "update": fields})
mode = os.environ["MODE"]
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        say(id=message["id"], result={"protocolVersion": 1, "agentInfo": {"name": "fake"}})
    elif message.get("method") == "session/new":
        if mode == "hangs at session/new": time.sleep(600)
        say(id=message["id"], result={"sessionId": "s"})
    elif message.get("method") == "session/prompt":
        turn = message["id"]
        if mode == "exits": print("I give up", file=sys.stderr); sys.exit(3)
        if mode == "hangs": time.sleep(600)
        if mode == "one line of 20 MB":
            content = [{"type": "content", "content": {"type": "text", "text": "x" * (20 << 20)}}]
            update(sessionUpdate="tool_call", toolCallId="c", title="big", status="completed", content=content)
        if mode == "one line of 80 MB": sys.stdout.write("y" * (80 << 20) + "\\n")
        if mode == "chatter": sys.stdout.write("no protocol\\n" * 300_000)
        if mode == "updates without end":
            while True: update(sessionUpdate="agent_message_chunk", content={"type": "text", "text": "z" * 100_000})
        if mode == "says no": say(id=turn, error={"code": -32603, "message": "Internal error", "data": {"details": "no model"}}); continue
        if mode == "asks":
            say(id=77, method="fs/read_text_file", params={"path": "/etc/passwd"})
            refused = json.loads(sys.stdin.readline())
            assert refused["error"]["code"] == -32601, refused
            options = [{"optionId": "yes", "kind": "allow_once"}]
            say(id=78, method="session/request_permission", params={"sessionId": "s", "options": options})
            allowed = json.loads(sys.stdin.readline())
            assert allowed["result"]["outcome"]["optionId"] == "yes", allowed
        open("answer.txt", "w").write("42")
        say(id=turn, result={"stopReason": "end_turn"})
"""  # noqa: E501


class FakeAcpAgent(Agent):
    """A double: a program in the sandbox that speaks ACP as badly as `mode` says."""

    name, needs_model = "fake-acp", False

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def install(self, sandbox: Sandbox) -> None:
        run(sandbox, ["mkdir", "-p", "/opt/fake"])
        sandbox.put(file_archive("fake.py", FAKE.encode()), "/opt/fake")

    def act(self, agent_run: AgentRun) -> str:
        env = {"MODE": self.mode, "HOME": agent_run.prepared.home}
        command = ["python3", "/opt/fake/fake.py"]
        pipe = agent_run.sandbox.open(command, user=agent_run.prepared.user, env=env, cwd=agent_run.prepared.workdir)
        try:
            agent_run.handshake_seconds = 2.0
            return acp.converse(agent_run, pipe, name=self.name, hint="use a pair that works")
        finally:
            pipe.close()


@pytest.fixture
def misbehave(tmp_path: Path, docker_client: object) -> Any:
    def go(mode: str, budget: float = 60.0) -> Seen:
        return attempt(tmp_path, make_task(tmp_path, agent=f"timeout_sec: {budget}"), FakeAcpAgent(mode))

    return go


@pytest.mark.docker
@pytest.mark.parametrize(
    ("mode", "category", "words"),
    [
        ("hangs at session/new", "acp_error", "fake-acp did not answer session/new within 2 s; use a pair that works"),
        ("exits", "pipe_closed", "fake-acp exited with code 3: I give up (it ended before its turn did)"),
        ("says no", "acp_error", "fake-acp answered with an error: Internal error: no model"),
        ("one line of 80 MB", "acp_error", "fake-acp wrote a line of more than 64 MB, which is no message"),
        ("updates without end", "acp_error", "the agent reported more than 64 MB about itself"),
    ],
)
def test_an_agent_that_breaks_the_protocol(misbehave: Any, mode: str, category: str, words: str) -> None:
    result = misbehave(mode).result
    assert (result["error_category"], result["error"]) == (category, words)


@pytest.mark.docker
def test_an_agent_that_hangs_runs_out_of_time(misbehave: Any) -> None:
    result = misbehave("hangs", budget=1.0).result
    assert (result["error_category"], result["error"]) == ("timeout", "Agent prompt exceeded wall-clock budget 1s")


@pytest.mark.docker
def test_a_line_of_20_mb_is_a_message_like_any_other(misbehave: Any) -> None:
    seen = misbehave("one line of 20 MB")
    assert seen.reward == 1.0 and seen.result["error"] is None and seen.result["n_tool_calls"] == 1
    assert "[job-task]   → end_turn, 1 total tool calls" in seen.lines


@pytest.mark.docker
def test_chatter_is_kept_apart_and_cut(misbehave: Any) -> None:
    seen = misbehave("chatter")
    assert seen.reward == 1.0
    log = (seen.folder / "agent" / "fake-acp.txt").read_bytes()
    assert log.startswith(b"no protocol\n") and len(log) < 2 << 20


@pytest.mark.docker
def test_requests_of_the_agent_are_refused_and_permission_is_given(misbehave: Any) -> None:
    assert misbehave("asks").reward == 1.0
