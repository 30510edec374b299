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
from capture.journal.files import write_json
from capture.journal.journal import JournalReader
from capture.journal.layout import RolloutDir
from proxy import OpenSession, ProxyError, ProxyThread
from sandbox.agents import AgentRun, Model
from sandbox.agents.trajectory import Trajectory
from sandbox.containers.archives import regular_files
from sandbox.containers.base import Sandbox, run
from sandbox.containers.pool import ContainerPool
from sandbox.errors import (
    AgentError,
    BrokenSandbox,
    DockerError,
    NoReward,
    RolloutError,
    SandboxError,
    Stopped,
    VerifierError,
)
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.result_files import RolloutReport, config_json, result_json, write_rollout_files
from sandbox.scoring import hardening
from sandbox.scoring.verifier import LOG_LIMIT, copy_files, verify
from sandbox.tasks.task import Task

#: Categories that an agent reports itself: the journal of its calls may know better.
REPORTED_BY_AGENT = ("agent_error", "api_error", "acp_error")


@dataclass
class Observer:
    """How a rollout is watched and stopped from outside while it runs."""

    #: Prints a line of the run's output.
    line: Callable[[str], None] = lambda _: None
    #: The user wants to stop: failures from now on are not the rollout's.
    stop: threading.Event = field(default_factory=threading.Event)
    #: `(rollout, phase)`: `setup`, `agent`, `verifier`.
    phase: Callable[[str, str], None] = lambda _rollout, _phase: None
    #: `(rollout, session id)`, when the agent got its key.
    session: Callable[[str, str], None] = lambda _rollout, _session: None


class Rollout:
    """One attempt at one task."""

    def __init__(
        self, plan: RolloutPlan, task: Task, folder: Path, pool: ContainerPool, proxy: ProxyThread | None,
        observer: Observer, retry_of: str | None = None, group: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`group`: `{"key", "index", "size"}` where it is a member of a trainer's group."""
        self.plan, self.task, self.pool, self.proxy, self.observer = plan, task, pool, proxy, observer
        self.dir = RolloutDir(folder)
        self.retry_of, self.group = retry_of, group
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
        self.removed: list[str] = []
        self.export_error: str | None = None

    def run(self) -> dict[str, Any]:
        """Runs it and returns the contents of `result.json`. Whatever goes wrong is in the result.

        Raises `Stopped` when the user stopped the job meanwhile: then there is no `result.json`, and the folder keeps
        what was captured.
        """
        prompt = "\n\n".join(filter(None, (self.task.agent.prompt_prefix, self.task.prompt)))
        start = time.monotonic()
        with self.failing():
            try:
                self.dir.path.mkdir(parents=True, exist_ok=False)
                write_json(self.dir.config, config_json(self.plan, self.task, self.pool.kind, self.started, self.group))
                write_json(self.dir.prompts, [prompt])
                self.in_sandbox(prompt)
            finally:
                self.close_session()
        with self.failing():
            self.trajectory.save(now=True)
            self.correct_category()
        if self.observer.stop.is_set() and (self.error or self.verifier_error):
            raise Stopped("the job was stopped")
        self.timing["total"] = round(time.monotonic() - start, 1)
        with self.failing():
            write_rollout_files(self.dir, result_json(self.report()), self.trajectory.events, self.timing)
        result = result_json(self.report())
        with contextlib.suppress(CaptureError):  # a full disk: the job's summary still counts the rollout
            write_json(self.dir.result, result)
        return result

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Turns what is raised into this rollout's error: one rollout may fail, the job continues."""
        try:
            yield
        except RolloutError as error:
            self.error = self.error or error
        except (CaptureError, OSError) as error:
            self.error = self.error or RolloutError(str(error), "infra_failure")
        except SandboxError:
            raise
        except Exception as error:
            sentence = f"this should not have happened ({type(error).__name__}: {error}); please report it"
            self.error = self.error or RolloutError(sentence)

    def in_sandbox(self, prompt: str) -> None:
        with self.clock("environment_setup"):
            sandbox = self.pool.sandbox(self.task, self.plan.agent, self.dir.name)
        try:
            with self.clock("environment_setup"):
                prepared = self.prepare(sandbox, prompt)
            try:
                self.act(sandbox, prepared, prompt)
            except BrokenSandbox as error:
                self.error, self.rewards = error, {"reward": 0.0}
                return
            except AgentError as error:
                if not self.budget_ended or error.category not in REPORTED_BY_AGENT:
                    self.error = error
                    if not self.should_verify(error):
                        return
            if self.budget_ended and self.error is None:
                self.stop_reason = "budget_reached"
            self.judge(sandbox, prepared)
        finally:
            self.remove(sandbox)

    def prepare(self, sandbox: Sandbox, prompt: str) -> hardening.Prepared:
        self.observer.phase(self.dir.name, "setup")
        spec = self.task.sandbox
        for command in spec.setup_commands:
            done = run(sandbox, ["sh", "-c", f'mkdir -p "$0" && cd "$0" && {command}', sandbox.workdir], timeout=600)
            if done.exit_code != 0:
                raise DockerError(f"the setup command {command!r} failed: {done.tail()}", "sandbox_setup")
        user = self.task.agent.user or "agent"
        options = self.task.verifier.hardening
        prepared = hardening.prepare(
            sandbox, user, cleanup_conftests=self.cleanup_conftests, safe_path=options.get("safe_path", True)
        )
        run(sandbox, ["sh", "-c", "cat > /instruction.md; chmod 644 /instruction.md"], stdin=prompt.encode())
        if user == "root":
            self.observer.line(f"[{self.task.name}] the agent is root and can forge its reward; see --verifier-sandbox")
        return prepared

    @property
    def cleanup_conftests(self) -> bool:
        return self.task.verifier.hardening.get("cleanup_conftests", True)

    def act(self, sandbox: Sandbox, prepared: hardening.Prepared, prompt: str) -> None:
        """Lets the agent work. Raises `AgentError`; its trajectory and calls are kept either way."""
        agent, name = self.plan.agent, self.dir.name
        model = self.open_session()
        env = {**self.plan.agent_env, **(model.env() if model else {})}
        agent_run = AgentRun(
            sandbox, self.task, prepared, prompt, model, env, self.trajectory, self.dir.agent,
            self.plan.budget(self.task),
            on_begin=lambda: self.observer.phase(name, "agent"),
        )  # fmt: skip
        self.observer.phase(name, "agent")
        try:
            with self.clock("agent_execution"):
                self.stop_reason = agent.act(agent_run)
        except (AgentError, DockerError) as error:  # Docker refuses to run a command in what the agent ended
            if (cause := sandbox.cause_of_death(None)) is not None:
                raise AgentError(f"{agent.name} {cause[1]}", cause[0]) from error
            raise
        finally:
            self.agent_name = agent_run.reported_name or agent.name
            self.after_act(sandbox)
        if failure := self.model_failure():
            raise failure
        if model is not None and not self.tally.get("calls"):
            raise AgentError(f"{agent.name} ended its turn without one call to its model")
        self.observer.line(f"[{self.task.name}]   → {self.stop_reason}, {self.trajectory.tool_calls} total tool calls")

    def after_act(self, sandbox: Sandbox) -> None:
        """Ends the agent's processes, then its session, so that nothing is left that could call; copies its logs."""
        sandbox.end_processes()
        self.close_session()
        for folder, to in (("/logs/agent", self.dir.agent), ("/logs/artifacts", self.dir.artifacts)):
            with contextlib.suppress(AgentError):
                if archive := sandbox.get(folder, LOG_LIMIT):
                    copy_files(regular_files(archive), to)

    def should_verify(self, error: RolloutError) -> bool:
        """An agent that worked and failed is judged by what it left; one that never reached its model is not."""
        if error.category in ("install_failure", "infra_failure", "sandbox_setup"):
            return False
        return self.plan.agent.needs_model is False or bool(self.tally.get("calls")) or error.category != "acp_error"

    def judge(self, sandbox: Sandbox, prepared: hardening.Prepared) -> None:
        """Runs the verifier. Where the agent left nothing that can be judged, the reward is 0."""
        self.observer.phase(self.dir.name, "verifier")
        try:
            with self.clock("verifier"), self.verifier_sandbox(sandbox, prepared) as judged:
                self.rewards = verify(judged, self.task, prepared, self.dir.verifier)
        except VerifierError as error:
            self.verifier_error = error
        except AgentError as error:
            self.error = self.error or error
            self.rewards = {"reward": 0.0}
        except RolloutError as error:
            if self.rewards is None:
                self.verifier_error = VerifierError(f"the verifier could not be run: {error}", "verifier_infra")
        timed_out = self.error is not None and self.error.category == "timeout"
        if self.rewards is None and timed_out and isinstance(self.verifier_error, NoReward):
            self.rewards, self.verifier_error = {"reward": 0.0}, None
        if self.rewards is not None and not self.observer.stop.is_set():
            self.observer.line(f"[{self.task.name}] Rewards: {self.rewards}")

    @contextlib.contextmanager
    def verifier_sandbox(self, sandbox: Sandbox, prepared: hardening.Prepared) -> Iterator[Sandbox]:
        """Where the verifier runs: the agent's sandbox, cleaned, or a fresh one that gets the cleaned workspace."""
        user = self.task.verifier.user
        self.removed = hardening.clean(
            sandbox, prepared, verifier_user=user, cleanup_conftests=self.cleanup_conftests,
            verifier_dir=self.task.verifier_dir,
        )  # fmt: skip
        if self.plan.verifier_mode(self.task) == "shared":
            yield sandbox
            return
        archive = sandbox.get(prepared.workdir, min(self.task.sandbox.storage_mb, 2048) << 20)
        fresh = self.pool.verifier_sandbox(self.task, self.dir.name)
        try:
            hardening.prepare(fresh, prepared.user)
            run(fresh, ["sh", "-c", 'rm -rf -- "$1"; mkdir -p "$1"', "sh", prepared.workdir])
            if archive is not None:
                fresh.put(archive, prepared.workdir.rpartition("/")[0] or "/")
            run(fresh, ["sh", "-c", hardening.RESET, "sh", prepared.workdir, user], timeout=hardening.BUDGET)
            yield fresh
        finally:
            self.remove(fresh)

    def remove(self, sandbox: Sandbox) -> None:
        """A sandbox that cannot be removed is reported; the rollout's result stands."""
        try:
            sandbox.remove()
        except DockerError as error:
            self.observer.line(f"[{self.task.name}] {error}")

    def open_session(self) -> Model | None:
        if not self.plan.agent.needs_model or self.proxy is None or self.plan.provider is None:
            return None
        try:
            self.session = self.proxy.open_session(
                self.dir.name, journal=self.dir.journal.absolute(), **self.plan.own_session_options()
            )
        except ProxyError as error:
            raise DockerError(f"the proxy opened no session: {error}") from error
        self.observer.session(self.dir.name, self.session.id)
        url = f"http://{self.pool.proxy_address(self.task)}:{self.proxy.port}/v1"
        return Model(url, self.session.api_key, self.plan.provider.served)

    def close_session(self) -> None:
        """Revokes the session's key and completes its journal; may be called twice."""
        if self.session is None or self.proxy is None:
            return
        session, self.session = self.session, None
        try:
            self.tally = self.proxy.close_session(session.id)
            self.export_error = self.tally.get("journal_failed")
        except ProxyError as error:
            self.export_error = f"the session could not be closed: {error}"

    def last_outcome(self) -> tuple[str, AgentError | None]:
        """How the journal's last call ended (`none` without calls), and its error where it was not answered."""
        if not self.tally.get("calls"):
            return "none", None
        try:
            sent = (call for call in JournalReader(self.dir.journal) if call.outcome != "ended")
            last = max(sent, key=lambda call: call.number, default=None)
        except CaptureError:
            return "none", None
        if last is None or last.outcome in ("ok", "aborted"):
            return last.outcome if last else "none", None
        reason = self.tally.get("last_error") or _message(last.response_body) or f"HTTP {last.status_code}"
        return "error", AgentError(f"the model's last call failed ({reason})", _category(last.status_code))

    @property
    def budget_ended(self) -> bool:
        """Whether the session's budget ended a call: an agent that then reports a failure did not fail by itself."""
        return bool((self.tally.get("budget") or {}).get("ended_calls"))

    def model_failure(self) -> AgentError | None:
        """The error of a turn that ended because its last call was not answered, though the agent did not report it."""
        return self.last_outcome()[1]

    def correct_category(self) -> None:
        """An agent's error gets the category that the journal proves: a failed last call is the provider's, and an
        agent that blames its model although every call was answered failed by itself."""
        if self.error is None or self.error.category not in REPORTED_BY_AGENT:
            return
        outcome, failure = self.last_outcome()
        if failure is not None:
            self.error = AgentError(str(self.error), failure.category)
        elif self.error.category == "api_error" and outcome == "ok":
            self.error = AgentError(str(self.error))

    def report(self) -> RolloutReport:
        return RolloutReport(
            self.plan, self.task, self.dir.name, self.pool.kind, self.started, self.agent_name, self.rewards,
            self.tally, self.trajectory.events, self.trajectory.tool_calls, self.trajectory.source, self.stop_reason,
            self.error, self.verifier_error, self.export_error, self.removed, self.retry_of, self.timing, self.group,
        )  # fmt: skip

    @contextlib.contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.timing[phase] = round(self.timing.get(phase, 0.0) + time.monotonic() - start, 1)


def _message(body: dict[str, Any]) -> str | None:
    """The message of an error's body, which every dialect keeps in the same place."""
    error = body.get("error")
    return str(error.get("message")) if isinstance(error, dict) else None


def _category(status: int) -> str:
    if status in (401, 403):
        return "provider_auth"
    if status == 429:
        return "provider_rate_limit"
    return "provider_rejected" if 400 <= status < 500 else "api_error"
