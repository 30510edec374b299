"""`mini-swe-agent`: one shell tool and a loop, without an ACP side; chat completions, not streamed.

It writes its transcript to a file after every step; that file becomes the trajectory when it ended or ran out of time.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from sandbox.agents.base import HOME, AgentRun
from sandbox.agents.install_npm import INSTALL_SECONDS, registries
from sandbox.agents.trajectory import Trajectory
from sandbox.containers.base import Sandbox, plain_files, run
from sandbox.errors import AgentError, InstallError

VERSION, LITELLM = "2.4.6", "1.110.2"
ROOT = f"{HOME}/mini-swe-agent"
TRANSCRIPT = "/logs/agent/mini-swe-agent.json"
#: Largest transcript that is read.
LONGEST = 64 << 20

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
#: How it says why it ended -> a stop reason in ACP's words.
STOPS = {"Submitted": "end_turn", "LimitsExceeded": "max_turn_requests", "TimeExceeded": "max_turn_requests"}


class MiniSweAgent:
    name = "mini-swe-agent"
    aliases: tuple[str, ...] = ("mini-swe",)
    about = "mini-swe-agent, one shell tool and a loop; speaks chat completions, not streamed"
    needs_model = True
    version = f"mini-swe-agent-{VERSION}-{LITELLM}"

    def install(self, sandbox: Sandbox) -> None:
        done = run(sandbox, ["sh", "-c", INSTALL], timeout=INSTALL_SECONDS, env=registries())
        if done.timed_out:
            raise InstallError(
                f"installing {self.name} took more than {INSTALL_SECONDS:g} s; bake it once: bench agents bake mini-swe"
            )
        if done.exit_code != 0:
            raise InstallError(f"{self.name} cannot be installed in this image: {done.tail(400)}")

    def act(self, agent_run: AgentRun) -> str:
        agent_run.said_name = self.name
        # JSON is YAML; its own `mini.yaml` comes first, and what is set here goes over it.
        agent_run.put_home({".config/mini-swe-agent/run.yaml": json.dumps(config(agent_run))})
        agent_run.trajectory.text("user_message", agent_run.prompt)
        agent_run.begin()
        done = run(
            agent_run.sandbox,
            [f"{ROOT}/bin/mini", "-c", "mini.yaml", "-c", f"{agent_run.prepared.home}/.config/mini-swe-agent/run.yaml",
             "-y", "--exit-immediately", "-o", TRANSCRIPT],
            user=agent_run.prepared.user,
            env={**ENV, **agent_run.env, "HOME": agent_run.prepared.home},
            cwd=agent_run.prepared.workdir,
            timeout=agent_run.left(),
        )  # fmt: skip
        agent_run.logs.mkdir(parents=True, exist_ok=True)
        (agent_run.logs / f"{self.name}.txt").write_bytes(done.stdout + done.stderr)
        transcript = read_transcript(agent_run.sandbox)
        tell(agent_run.trajectory, transcript)
        if done.timed_out:
            raise agent_run.out_of_time()
        if done.exit_code != 0:
            raise agent_run.died(self.name, done)
        status = str((transcript.get("info") or {}).get("exit_status") or "")
        if not status:
            raise AgentError(f"{self.name} left no transcript: {done.tail() or 'it said nothing'}")
        return STOPS.get(status, status)


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
        "max_tokens": agent_run.longest_reply,  # else a model that finds no end goes on to the end of its context
    }
    return {
        "run": {"task": agent_run.prompt},
        "agent": {"cost_limit": 0},
        "model": {"model_name": f"openai/{agent_run.model.name}", "model_class": "litellm", "model_kwargs": reached},
    }


def read_transcript(sandbox: Sandbox) -> dict[str, Any]:
    """The transcript so far, {} where there is none that can be read. Raises `AgentError` over `LONGEST` bytes."""
    archive = sandbox.get("/logs/agent", LONGEST)
    data = plain_files(archive).get(TRANSCRIPT.rpartition("/")[2]) if archive else None
    with contextlib.suppress(ValueError):
        found = json.loads(data or b"")
        if isinstance(found, dict):
            return found
    return {}


def tell(trajectory: Trajectory, transcript: dict[str, Any]) -> None:
    """The transcript's messages as events. The first two are its prompts; of a broken one nothing is told."""
    for message in transcript.get("messages") or []:
        if not isinstance(message, dict):
            continue
        role, content = message.get("role"), message.get("content")
        text = content if isinstance(content, str) else ""
        if role == "assistant":
            if text.strip():
                trajectory.text("agent_message", text)
            for call in message.get("tool_calls") or []:
                function = call.get("function") or {}
                trajectory.tool(
                    str(call.get("id")), kind="execute", title=function.get("name"), status="in_progress",
                    raw_input=arguments(function.get("arguments")),
                )  # fmt: skip
        elif role == "tool":
            shown = [{"type": "content", "content": {"type": "text", "text": text}}]
            extra = message.get("extra") or {}
            # The command that ends its run is not run; it says so as an error.
            failed = extra.get("returncode") not in (0, None) and extra.get("exception_info") != NOT_RUN
            status = "failed" if failed else "completed"
            trajectory.tool(str(message.get("tool_call_id")), status=status, content=shown, raw_output=text)


def arguments(text: Any) -> Any:
    with contextlib.suppress(TypeError, ValueError):
        return json.loads(text)
    return text
