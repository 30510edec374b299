"""`mini`: our own agent, and the example to copy. It is `mini_program.py`, one file that is put into the sandbox."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from sandbox.agents.base import HOME, AgentRun
from sandbox.containers.base import Sandbox, file_archive, run
from sandbox.errors import AgentError, InstallError

SOURCE = Path(__file__).with_name("mini_program.py")
#: Its exit code when the model could not be reached or refused the call.
MODEL_FAILED = 3


class Mini:
    name = "mini"
    aliases: tuple[str, ...] = ()
    about = "our own agent, one file and three tools; speaks chat completions, nothing to install"
    needs_model = True
    version = None

    def install(self, sandbox: Sandbox) -> None:
        found = run(
            sandbox, ["sh", "-c", "command -v python3 && python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))'"]
        )
        if found.exit_code != 0:
            raise InstallError(
                "mini needs Python 3.8 or newer, and this image has no such python3; "
                "take an image that has it, or another agent"
            )
        run(sandbox, ["mkdir", "-p", HOME])
        sandbox.put(file_archive(SOURCE.name, SOURCE.read_bytes()), HOME)

    def act(self, agent_run: AgentRun) -> str:
        ended: dict[str, Any] = {}
        agent_run.said_name = "mini"
        agent_run.trajectory.text("user_message", agent_run.prompt)
        agent_run.begin()
        with _log(agent_run) as log:

            def on_line(line: bytes) -> None:
                event = _event(line)
                if event is None:
                    log.write(line + b"\n")
                elif event["type"] == "end":
                    ended.update(event)
                elif event["type"] == "tool_call":
                    del event["type"]
                    agent_run.trajectory.tool(event.pop("tool_call_id"), **event)
                else:
                    agent_run.trajectory.text(event["type"], event["text"])

            done = run(
                agent_run.sandbox,
                ["python3", "-I", "-u", f"{HOME}/{SOURCE.name}"],
                user=agent_run.prepared.user,
                env={"HOME": agent_run.prepared.home, **agent_run.env},
                cwd=agent_run.prepared.workdir,
                stdin=agent_run.prompt.encode(),
                timeout=agent_run.left(),
                on_line=on_line,
            )
            log.write(done.stderr)
        if done.timed_out:
            raise agent_run.out_of_time()
        if done.exit_code == MODEL_FAILED:
            raise AgentError(
                f"mini got no answer from the model: {done.stderr.decode(errors='replace').strip()}", "api_error"
            )
        if done.exit_code != 0 or "stop_reason" not in ended:
            raise agent_run.died("mini", done)
        return str(ended["stop_reason"])


def _event(line: bytes) -> dict[str, Any] | None:
    """What a line of mini's output tells, None for a line that is not one of its events."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and event.get("type") in ("agent_message", "agent_thought", "tool_call", "end"):
            return event
    return None


class _Log:
    """Keeps the first megabyte of what the agent says besides its events."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._left = 1 << 20

    def write(self, data: bytes) -> None:
        self._file.write(data[: self._left])
        self._left = max(0, self._left - len(data))

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _log(agent_run: AgentRun) -> _Log:
    return _Log(agent_run.logs / "mini.txt")
