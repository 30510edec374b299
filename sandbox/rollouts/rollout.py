"""One rollout, from an empty folder to `result.json`: prepare, act, verify, write."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.errors import CaptureError
from capture.journal.files import write_atomic, write_json
from capture.journal.journal import JournalReader
from capture.journal.layout import RolloutDir
from proxy import OpenSession, ProxyError, ProxyThread, SessionOptions
from sandbox.agents import Agent, AgentRun, Model
from sandbox.agents.trajectory import Trajectory
from sandbox.containers.base import Sandbox, plain_files, run
from sandbox.containers.pool import ContainerPool
from sandbox.errors import AgentError, DockerError, RolloutError, SandboxError, Stopped, VerifierError
from sandbox.rollouts.model_endpoint import Provider
from sandbox.rollouts.result_files import config_json, result_json, write_rollout_files
from sandbox.scoring import hardening
from sandbox.scoring.verifier import verify
from sandbox.tasks.task import Task

DEFAULT_BUDGET = 900.0
LOG_LIMIT = 64 << 20


@dataclass(frozen=True)
class Plan:
    """What all rollouts of a job have in common."""

    job: str
    agent: Agent
    provider: Provider | None
    #: Variables for the agent's processes, without those that say where the model is.
    agent_env: dict[str, str] = field(default_factory=dict)
    #: Seconds for every prompt; None: the task's own, else `DEFAULT_BUDGET`.
    timeout: float | None = None
    #: `shared`, `separate`, or None for what the task says.
    verifier_sandbox: str | None = None
    #: What the session of each rollout has; its engine, and whether it captures, are the provider's.
    session: SessionOptions = field(default_factory=SessionOptions)

    def budget(self, task: Task) -> float:
        return self.timeout or task.agent.timeout_sec or DEFAULT_BUDGET


@dataclass
class Watch:
    """How a rollout is seen from outside while it runs."""

    say: Callable[[str], None] = lambda _: None
    #: The user wants to stop: what fails from now on failed for that.
    stop: threading.Event = field(default_factory=threading.Event)
    #: `(rollout, phase)`: `setup`, `agent`, `verifier`.
    phase: Callable[[str, str], None] = lambda _rollout, _phase: None
    #: `(rollout, session id)`, when the agent got its key.
    session: Callable[[str, str], None] = lambda _rollout, _session: None


class Rollout:
    """One try at one task."""

    def __init__(
        self, plan: Plan, task: Task, folder: Path, pool: ContainerPool, proxy: ProxyThread | None, watch: Watch,
        retry_of: str | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.task, self.pool, self.proxy, self.watch = plan, task, pool, proxy, watch
        self.dir = RolloutDir(folder)
        self.retry_of = retry_of
        self.trajectory = Trajectory(self.dir.acp_trajectory)
        self.started = datetime.datetime.now()
        self.timing: dict[str, float] = {}
        self.error: RolloutError | None = None
        self.verifier_error: RolloutError | None = None
        self.rewards: dict[str, Any] | None = None
        self.stop_reason: str | None = None
        self.agent_name: str | None = None
        self.session: OpenSession | None = None
        self.tally: dict[str, Any] = {}
        self.cleaned: list[str] = []
        self.export_error: str | None = None

    def run(self) -> dict[str, Any]:
        """Runs it and returns what `result.json` says. Raises `Stopped` when the user stopped the job meanwhile: then
        there is no `result.json`, and the folder keeps what was captured."""
        prompt = "\n\n".join(filter(None, (self.task.agent.prompt_prefix, self.task.prompt)))
        self.dir.path.mkdir(parents=True, exist_ok=False)
        write_json(self.dir.config, config_json(self))
        write_json(self.dir.prompts, [prompt])
        began = time.monotonic()
        try:
            self.in_sandbox(prompt)
        except RolloutError as error:
            self.error = self.error or error
        except CaptureError as error:
            self.error = self.error or RolloutError(str(error), "infra_failure")
        except SandboxError:
            raise
        except Exception as error:  # a fault of ours ends this rollout, not the job
            self.error = RolloutError(
                f"this should not have happened ({type(error).__name__}: {error}); please report it"
            )
        finally:
            self.seal()
            self.trajectory.save(now=True)
        if self.watch.stop.is_set() and (self.error or self.verifier_error):
            raise Stopped("the job was stopped")
        self.timing["total"] = round(time.monotonic() - began, 1)
        return self.write()

    def in_sandbox(self, prompt: str) -> None:
        with self.clock("environment_setup"):
            sandbox = self.pool.sandbox(self.task, self.plan.agent, self.dir.name)
        try:
            with self.clock("environment_setup"):
                prepared = self.prepare(sandbox, prompt)
            try:
                self.act(sandbox, prepared, prompt)
            except AgentError as error:
                self.error = error
                if not self.to_be_verified(error):
                    return
            self.judge(sandbox, prepared)
        finally:
            sandbox.remove()

    def prepare(self, sandbox: Sandbox, prompt: str) -> hardening.Prepared:
        self.watch.phase(self.dir.name, "setup")
        spec = self.task.sandbox
        for command in spec.setup_commands:
            done = run(sandbox, ["sh", "-c", f'mkdir -p "$0" && cd "$0" && {command}', sandbox.workdir], timeout=600)
            if done.exit_code != 0:
                raise DockerError(f"the setup command {command!r} failed: {done.tail()}", "sandbox_setup")
        user = self.task.agent.user or "agent"
        prepared = hardening.prepare(sandbox, user, cleanup_conftests=self.conftests)
        run(sandbox, ["sh", "-c", "cat > /instruction.md; chmod 644 /instruction.md"], stdin=prompt.encode())
        if user == "root":
            self.watch.say(f"[{self.task.name}] the agent is root: it could forge its reward; see --verifier-sandbox")
        return prepared

    @property
    def conftests(self) -> bool:
        return self.task.verifier.hardening.get("cleanup_conftests", True)

    def act(self, sandbox: Sandbox, prepared: hardening.Prepared, prompt: str) -> None:
        """Lets the agent work. Raises `AgentError`; its trajectory and calls are kept either way."""
        agent, name = self.plan.agent, self.dir.name
        model = self.open_session()
        env = {**self.plan.agent_env, **(model.env() if model else {})}
        agent_run = AgentRun(
            sandbox, self.task, prepared, prompt, model, env, self.trajectory, self.dir.agent,
            self.plan.budget(self.task),
            on_begin=lambda: self.watch.phase(name, "agent"),
        )  # fmt: skip
        self.watch.phase(name, "agent")
        try:
            with self.clock("agent_execution"):
                self.stop_reason = agent.act(agent_run)
        except AgentError as error:
            if (cause := sandbox.cause_of_death(None)) is not None:
                raise AgentError(f"{agent.name} {cause[1]}", cause[0]) from error
            raise
        finally:
            self.agent_name = agent_run.said_name or agent.name
            self.after_act(sandbox)
        if failed := self.model_failure():
            raise failed
        if model is not None and not self.tally.get("calls"):
            raise AgentError(f"{agent.name} ended its turn without one call to its model")
        self.watch.say(f"[{self.task.name}]   → {self.stop_reason}, {self.trajectory.tool_calls} total tool calls")

    def after_act(self, sandbox: Sandbox) -> None:
        """Ends the agent for good: first its processes, then its session, so that nothing is left that could call."""
        sandbox.end_processes()
        self.seal()
        for folder, to in (("/logs/agent", self.dir.agent), ("/logs/artifacts", self.dir.artifacts)):
            with contextlib.suppress(AgentError):
                archive = sandbox.get(folder, LOG_LIMIT)
                for path, data in plain_files(archive).items() if archive else ():
                    write_atomic(to / path, data)

    def to_be_verified(self, error: RolloutError) -> bool:
        """An agent that worked and failed is judged by what it left; one that never came to its model is not."""
        if error.category in ("install_failure", "infra_failure", "sandbox_setup"):
            return False
        return self.plan.agent.needs_model is False or bool(self.tally.get("calls")) or error.category != "acp_error"

    def judge(self, sandbox: Sandbox, prepared: hardening.Prepared) -> None:
        self.watch.phase(self.dir.name, "verifier")
        mode = self.plan.verifier_sandbox or self.task.verifier.sandbox_mode or "shared"
        try:
            with self.clock("verifier"), self.cleaned_box(sandbox, prepared, mode) as judged:
                self.rewards = verify(judged, self.task, prepared, self.dir.verifier)
        except VerifierError as error:
            self.verifier_error = error
        except RolloutError as error:
            self.verifier_error = VerifierError(f"the verifier could not be run: {error}", "verifier_infra")
        if self.rewards is None and self.error and self.error.category == "timeout" and self.wrote_no_reward():
            self.rewards, self.verifier_error = {"reward": 0.0}, None
        if self.rewards is not None and not self.watch.stop.is_set():  # what is dropped is not told
            self.watch.say(f"[{self.task.name}] Rewards: {self.rewards}")

    def wrote_no_reward(self) -> bool:
        return self.verifier_error is not None and str(self.verifier_error).startswith("No reward file found")

    @contextlib.contextmanager
    def cleaned_box(self, sandbox: Sandbox, prepared: hardening.Prepared, mode: str) -> Iterator[Sandbox]:
        """The box in which the verifier runs: the agent's, cleaned, or a fresh one that gets the cleaned workspace."""
        user = self.task.verifier.user
        self.cleaned = hardening.clean(sandbox, prepared, verifier_user=user, cleanup_conftests=self.conftests)
        if mode == "shared":
            yield sandbox
            return
        archive = sandbox.get(prepared.workdir, min(self.task.sandbox.storage_mb, 2048) << 20)
        fresh = self.pool.fresh(self.task, self.dir.name)
        try:
            hardening.prepare(fresh, prepared.user)
            run(fresh, ["sh", "-c", 'rm -rf -- "$1"; mkdir -p "$1"', "sh", prepared.workdir])
            if archive is not None:
                fresh.put(archive, prepared.workdir.rpartition("/")[0] or "/")
            run(fresh, ["sh", "-c", hardening.RESET, "sh", prepared.workdir, user], timeout=hardening.BUDGET)
            yield fresh
        finally:
            fresh.remove()

    def open_session(self) -> Model | None:
        if not self.plan.agent.needs_model or self.proxy is None or self.plan.provider is None:
            return None
        provider = self.plan.provider
        try:
            self.session = self.proxy.open_session(self.dir.name, journal=self.dir.journal.absolute())
        except ProxyError as error:
            raise DockerError(f"the proxy opened no session: {error}") from error
        self.watch.session(self.dir.name, self.session.id)
        url = f"http://{self.pool.host_for(self.task)}:{self.proxy.port}/v1"
        return Model(url, self.session.api_key, provider.served)

    def seal(self) -> None:
        """Closes the session: its key opens nothing any more, its journal is whole."""
        if self.session is None or self.proxy is None:
            return
        session, self.session = self.session, None
        try:
            self.tally = self.proxy.close_session(session.id)
            self.export_error = self.tally.get("journal_failed")
        except ProxyError as error:
            self.export_error = f"the session could not be sealed: {error}"

    def model_failure(self) -> AgentError | None:
        """The error of a turn that ended because its last call was not answered, though the agent did not say so."""
        if not self.tally.get("calls"):
            return None
        try:
            last = max(JournalReader(self.dir.journal), key=lambda call: call.number, default=None)
        except CaptureError:
            return None
        if last is None or last.outcome in ("ok", "aborted"):
            return None
        told = self.tally.get("last_error") or _said(last.response_body) or f"HTTP {last.status_code}"
        return AgentError(f"the model's last call failed ({told})", _provider(last.status_code))

    def write(self) -> dict[str, Any]:
        """Every file of the folder, `result.json` last."""
        told_by_agent = self.error is not None and self.error.category in ("agent_error", "api_error", "acp_error")
        if told_by_agent and (failed := self.model_failure()):
            self.error = AgentError(str(self.error), failed.category)
        result = result_json(self)
        write_rollout_files(self.dir, result, self.trajectory.events, self.timing)
        write_json(self.dir.result, result)
        return result

    @contextlib.contextmanager
    def clock(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.timing[name] = round(self.timing.get(name, 0.0) + time.monotonic() - began, 1)


def _said(body: dict[str, Any]) -> str | None:
    """The sentence of an error's body, which every dialect keeps in the same place."""
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else None


def _provider(status: int) -> str:
    if status in (401, 403):
        return "provider_auth"
    if status == 429:
        return "provider_rate_limit"
    return "provider_rejected" if 400 <= status < 500 else "api_error"
