"""What an agent says about itself: how to install it, how to check its task, how to run it."""

from __future__ import annotations

from sandbox.agents.agent_run import AgentRun
from sandbox.containers.base import Sandbox
from sandbox.tasks.task import Task

#: Folder in the sandbox below which agents are installed.
INSTALL_ROOT = "/opt/benchflow"


class Agent:
    """One agent. With a `version`, `install` runs once per image and its result is saved under that version."""

    name: str
    aliases: tuple[str, ...] = ()
    #: One line for `bench agents list`.
    about: str = ""
    needs_model: bool = True
    version: str | None = None

    def check_task(self, task: Task) -> None:
        """Called before a job starts. Raises `TaskError` for a task that this agent cannot run."""

    def install(self, sandbox: Sandbox) -> None:
        """As root, before the clock starts, with internet access. Raises `InstallError`."""

    def act(self, agent_run: AgentRun) -> str:
        """Does the task and returns why it stopped, usually `end_turn`. Raises `AgentError`."""
        raise NotImplementedError
