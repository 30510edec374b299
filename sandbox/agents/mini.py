"""`mini`: our own agent, and the example to copy. The program, `mini_program.py`, is one file put into the sandbox."""

from __future__ import annotations

from pathlib import Path

from capture import json
from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import INSTALL_ROOT, Agent
from sandbox.containers.archives import file_archive
from sandbox.containers.base import Sandbox, run
from sandbox.errors import AgentError, InstallError

SOURCE = Path(__file__).with_name("mini_program.py")
#: Its exit code when the model could not be reached or refused the call.
MODEL_FAILED = 3
TOOL_FIELDS = ("kind", "title", "status", "content", "raw_input", "raw_output")


class Mini(Agent):
    name = "mini"
    about = "our own agent, one file and three tools; speaks chat completions, nothing to install"
    version = None

    def install(self, sandbox: Sandbox) -> None:
        found = run(
            sandbox, ["sh", "-c", "command -v python3 && python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))'"]
        )
        if found.exit_code != 0:
            raise InstallError(
                "mini needs Python 3.8 or newer, and this image has no such python3; "
                "use an image that has it, or another agent"
            )
        run(sandbox, ["mkdir", "-p", INSTALL_ROOT])
        sandbox.put(file_archive(SOURCE.name, SOURCE.read_bytes()), INSTALL_ROOT)

    def act(self, agent_run: AgentRun) -> str:
        stop_reason: str | None = None
        agent_run.reported_name = "mini"
        agent_run.trajectory.text("user_message", agent_run.prompt)
        agent_run.begin()
        with _log(agent_run) as log:

            def on_line(line: bytes) -> None:
                nonlocal stop_reason
                match json.loads_or_none(line):
                    case {"type": "end", "stop_reason": str(reason)}:
                        stop_reason = reason
                    case {"type": "tool_call", "tool_call_id": call_id, **fields}:
                        agent_run.trajectory.tool(call_id, **{name: fields.get(name) for name in TOOL_FIELDS})
                    case {"type": "agent_message" | "agent_thought" as kind, "text": str(text)}:
                        agent_run.trajectory.text(kind, text)
                    case _:
                        log.write(line + b"\n")

            done = run(
                agent_run.sandbox,
                ["python3", "-I", "-u", f"{INSTALL_ROOT}/{SOURCE.name}"],
                user=agent_run.prepared.user,
                env={"HOME": agent_run.prepared.home, **agent_run.env},
                cwd=agent_run.prepared.workdir,
                stdin=agent_run.prompt.encode(),
                timeout=agent_run.seconds_left(),
                on_line=on_line,
            )
            log.write(done.stderr)
        if done.timed_out:
            raise agent_run.out_of_time()
        if done.exit_code == MODEL_FAILED:
            raise AgentError(
                f"mini got no answer from the model: {done.stderr.decode(errors='replace').strip()}", "api_error"
            )
        if done.exit_code != 0 or stop_reason is None:
            raise agent_run.died("mini", done)
        return stop_reason


class _Log:
    """Keeps the first megabyte of what the agent prints besides its events."""

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
