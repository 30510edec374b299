"""`mini-swe-agent`: one shell tool and a loop, without ACP; chat completions, not streamed.

It writes its transcript to a file after every step; that file becomes the trajectory when it ended or ran out of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capture import json
from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import INSTALL_ROOT, Agent
from sandbox.agents.install_npm import INSTALL_SECONDS, registries
from sandbox.agents.trajectory import Trajectory
from sandbox.containers.archives import regular_files
from sandbox.containers.base import Sandbox, run
from sandbox.errors import AgentError, InstallError

VERSION, LITELLM = "2.4.6", "1.110.2"
ROOT = f"{INSTALL_ROOT}/mini-swe-agent"
TRANSCRIPT = "/logs/agent/mini-swe-agent.json"
#: Largest transcript that is read.
MAX_TRANSCRIPT = 64 << 20

#: Its batch runner's and its inspector's packages (datasets, textual: 440 MB) are left out; `mini` needs neither.
INSTALL = f"""
set -e
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {{ echo "this image has no Python 3.10"; exit 64; }}
python3 -m venv {ROOT}
pip="{ROOT}/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check"
$pip 'litellm=={LITELLM}' openai jinja2 pydantic python-dotenv rich tenacity typer platformdirs prompt_toolkit \\
  pyyaml requests
$pip --no-deps 'mini-swe-agent=={VERSION}'
MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 {ROOT}/bin/mini --help >/dev/null
"""

NOT_RUN = "action was not executed"
#: Its exit status -> the stop reason in ACP's terms.
STOP_REASONS = {"Submitted": "end_turn", "LimitsExceeded": "max_turn_requests", "TimeExceeded": "max_turn_requests"}


class MiniSweAgent(Agent):
    name = "mini-swe-agent"
    aliases = ("mini-swe",)
    about = "mini-swe-agent, one shell tool and a loop; speaks chat completions, not streamed"
    version = f"mini-swe-agent-{VERSION}-{LITELLM}"

    def install(self, sandbox: Sandbox) -> None:
        done = run(sandbox, ["sh", "-c", INSTALL], timeout=INSTALL_SECONDS, env=registries())
        if done.timed_out:
            raise InstallError(
                f"installing {self.name} took more than {INSTALL_SECONDS:g} s; "
                "build it once: bench agents build mini-swe"
            )
        if done.exit_code != 0:
            raise InstallError(f"{self.name} cannot be installed in this image: {done.tail(400)}")

    def act(self, agent_run: AgentRun) -> str:
        agent_run.reported_name = self.name
        # JSON is YAML; its own `mini.yaml` comes first, and what is set here goes over it.
        agent_run.put_home({".config/mini-swe-agent/run.yaml": json.dumps(config(agent_run)).decode()})
        agent_run.trajectory.text("user_message", agent_run.prompt)
        agent_run.begin()
        done = run(
            agent_run.sandbox,
            [f"{ROOT}/bin/mini", "-c", "mini.yaml", "-c", f"{agent_run.prepared.home}/.config/mini-swe-agent/run.yaml",
             "-y", "--exit-immediately", "-o", TRANSCRIPT],
            user=agent_run.prepared.user,
            env={**ENV, **agent_run.env, "HOME": agent_run.prepared.home},
            cwd=agent_run.prepared.workdir,
            timeout=agent_run.seconds_left(),
        )  # fmt: skip
        agent_run.logs.mkdir(parents=True, exist_ok=True)
        (agent_run.logs / f"{self.name}.txt").write_bytes(done.stdout + done.stderr)
        transcript = read_transcript(agent_run.sandbox)
        add_transcript(agent_run.trajectory, transcript)
        if done.timed_out:
            raise agent_run.out_of_time()
        if done.exit_code != 0:
            raise agent_run.died(self.name, done)
        info = transcript.get("info")
        status = info.get("exit_status") if isinstance(info, dict) else None
        if not isinstance(status, str) or not status:
            raise AgentError(f"{self.name} left no transcript: {done.tail() or 'it printed nothing'}")
        return STOP_REASONS.get(status, status)


ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",  # its own ten, up to a minute apart, outlive most budgets
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def config(agent_run: AgentRun) -> dict[str, Any]:
    """What goes over its `mini.yaml`: the task, the model, and no limit but the budget."""
    assert agent_run.model is not None
    reached = {
        "api_base": agent_run.model.base_url,
        "api_key": agent_run.model.api_key,
        "max_tokens": agent_run.max_reply_tokens,  # a model that does not stop fills its context otherwise
    }
    return {
        "run": {"task": agent_run.prompt},
        "agent": {"cost_limit": 0},
        "model": {"model_name": f"openai/{agent_run.model.name}", "model_class": "litellm", "model_kwargs": reached},
    }


def read_transcript(sandbox: Sandbox) -> dict[str, Any]:
    """The transcript so far, {} when it cannot be read. Raises `AgentError` for more than `MAX_TRANSCRIPT` bytes."""
    archive = sandbox.get("/logs/agent", MAX_TRANSCRIPT)
    name = TRANSCRIPT.rpartition("/")[2]
    data = next((data for path, data in regular_files(archive) if path == name), b"") if archive else b""
    transcript = json.loads_or_none(data)
    return transcript if isinstance(transcript, dict) else {}


def add_transcript(trajectory: Trajectory, transcript: dict[str, Any]) -> None:
    """Adds the transcript's messages as events, except its first two, which are prompts; skips what is malformed."""
    messages = transcript.get("messages")
    for message in messages if isinstance(messages, list) else []:
        match message:
            case {"role": "assistant", **fields}:
                content, calls = fields.get("content"), fields.get("tool_calls")
                if isinstance(content, str) and content.strip():
                    trajectory.text("agent_message", content)
                for call in calls if isinstance(calls, list) else []:
                    add_call(trajectory, call)
            case {"role": "tool", **fields}:
                add_tool_result(trajectory, fields)


def add_call(trajectory: Trajectory, call: object) -> None:
    match call:
        case {"id": call_id, "function": {"name": name, **fields}}:
            given = fields.get("arguments")
            parsed = json.loads_or_none(given) if isinstance(given, str) else None
            trajectory.tool(
                call_id, kind="execute", title=name, status="in_progress",
                raw_input=given if parsed is None else parsed,
            )  # fmt: skip


def add_tool_result(trajectory: Trajectory, message: Mapping[Any, Any]) -> None:
    content, extra = message.get("content"), message.get("extra")
    text = content if isinstance(content, str) else ""
    extra = extra if isinstance(extra, dict) else {}
    # The command that submits the work is not run, and is reported as an error.
    failed = extra.get("returncode") not in (0, None) and extra.get("exception_info") != NOT_RUN
    trajectory.tool(
        message.get("tool_call_id"), status="failed" if failed else "completed", raw_output=text,
        content=[{"type": "content", "content": {"type": "text", "text": text}}],
    )  # fmt: skip
