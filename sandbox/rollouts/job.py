"""Many rollouts: tasks × trials, some at once, failures of infrastructure tried again, the job's files around them."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from capture.journal.layout import JobDir, trial_name
from proxy import ProxyError, ProxyThread, Settings
from sandbox.containers.pool import ContainerPool, DockerPool
from sandbox.errors import INFRASTRUCTURE, JobError, SandboxError, Stopped, TaskError
from sandbox.rollouts.job_folder import Job, evaluation_json, open_job
from sandbox.rollouts.model_endpoint import refuse_leak
from sandbox.rollouts.progress import Progress
from sandbox.rollouts.result_files import outcome
from sandbox.rollouts.rollout import Plan, Rollout, Watch
from sandbox.tasks.task import Task


@dataclass(frozen=True)
class Options:
    """How a job is run."""

    jobs_dir: Path = Path("jobs")
    trials: int = 1
    concurrency: int = 4
    #: More tries for a rollout that failed for another reason than its agent.
    retries: int = 0
    resume: bool = False
    #: Stop at the first rollout that gets no reward.
    fail_fast: bool = False


@dataclass
class Outcome:
    """How a run ended: one summary a trial, in order."""

    summaries: list[dict[str, Any]] = field(default_factory=list)
    stopped: bool = False

    @property
    def unscored(self) -> int:
        return sum(summary["errored"] + summary["verifier_errored"] for summary in self.summaries)


def run_job(
    plan: Plan,
    tasks: Sequence[Task],
    options: Options,
    progress: Progress,
    *,
    stop: threading.Event | None = None,
    make_house: Callable[[str, list[Task], Callable[[str], None]], ContainerPool] = DockerPool,
    on_house: Callable[[ContainerPool], None] = lambda _: None,
) -> Outcome:
    """Runs every task in every trial and writes the job folders. `stop`, set from outside, ends it early and cleanly.

    Raises `JobError` or `TaskError` before anything ran; what goes wrong later is in the results.
    """
    stop = stop or threading.Event()
    check_tasks(plan, tasks)
    with contextlib.ExitStack() as open_things:
        jobs = [
            open_things.enter_context(
                open_job(folder, evaluation_json(plan, tasks, options.retries, n, options.trials), options.resume)
            )
            for n, folder in enumerate(job_folders(plan.job, options), 1)
        ]
        run = _Run(plan, list(tasks), options, progress, stop)
        pool = make_house(plan.job, run.tasks, run.say)
        open_things.callback(pool.close)
        on_house(pool)
        with run.proxy(pool) as proxy:
            run.all(jobs, pool, proxy)
        stopped = stop.is_set()
        return Outcome([job.finish(plan, stopped=stopped) for job in jobs], stopped)


def job_folders(job: str, options: Options) -> list[JobDir]:
    """`<jobs-dir>/<job>`, or one below `trial-01` and so on for each of several trials."""
    if options.trials == 1:
        return [JobDir(options.jobs_dir / job)]
    return [JobDir(options.jobs_dir / trial_name(n) / job) for n in range(1, options.trials + 1)]


def check_tasks(plan: Plan, tasks: Sequence[Task]) -> None:
    if not tasks:
        raise JobError("there is no task to run")
    for env in (plan.agent_env, *(task.sandbox.env for task in tasks)):
        if plan.provider is not None:
            refuse_leak(plan.provider, env)
    if plan.agent.name == "oracle":
        for task in tasks:
            if not (task.oracle_dir / "solve.sh").is_file():
                raise TaskError(f"Oracle requires oracle/solve.sh or legacy solution/solve.sh: {task.path}")


class _Run:
    def __init__(
        self, plan: Plan, tasks: list[Task], options: Options, progress: Progress, stop: threading.Event
    ) -> None:
        self.plan, self.tasks, self.options, self.progress, self.stop = plan, tasks, options, progress, stop
        self._proxy: ProxyThread | None = None

    def say(self, text: str) -> None:
        if self.stop.is_set():
            raise Stopped("the job was stopped")
        if text:
            self.progress.status(text)

    @contextlib.contextmanager
    def proxy(self, pool: ContainerPool) -> Iterator[ProxyThread | None]:
        """One proxy for the whole job, listening where the sandboxes reach it and nowhere else."""
        provider = self.plan.provider
        if not self.plan.agent.needs_model or provider is None:
            for warning in pool.guard([]):
                self.progress.status(warning)
            yield None
            return
        first, *more = pool.hosts()
        session = replace(
            self.plan.session, upstream=[provider.base_url], upstream_key=provider.api_key, engine=provider.engine,
            model=provider.served, capture=provider.capture, top_logprobs=provider.top_logprobs,
        )  # fmt: skip
        settings = Settings.of(session, host=first, more_hosts=more, probe=False, grace=10.0)
        try:
            with ProxyThread(settings) as proxy:
                for warning in pool.guard([proxy.port]):
                    self.progress.status(warning)
                yield proxy
        except ProxyError as error:
            raise JobError(f"the proxy cannot be started: {error}") from error

    def all(self, jobs: list[Job], pool: ContainerPool, proxy: ProxyThread | None) -> None:
        work = [(job, task) for job in jobs for task in self.tasks if not job.kept(task.name)]
        kept = len(jobs) * len(self.tasks) - len(work)
        if kept:
            self.progress.status(f"{kept} finished rollouts are kept")
        self.progress.begin(len(work), proxy)
        executor = ThreadPoolExecutor(max_workers=self.options.concurrency, thread_name_prefix="rollout")
        try:
            running = [executor.submit(self.one, job, task, pool, proxy) for job, task in work]
            for future in as_completed(running):
                future.result()
        finally:
            self.progress.end()
            executor.shutdown(wait=True, cancel_futures=True)

    def one(self, job: Job, task: Task, pool: ContainerPool, proxy: ProxyThread | None) -> None:
        """One task's rollout, and further ones while it fails for reasons of infrastructure and tries are left."""
        retry_of = job.to_replace(task.name)
        for attempt in range(self.options.retries + 1):
            if self.stop.is_set():
                return
            if attempt and self.stop.wait(min(30.0, 2.0 ** (attempt - 1))):
                return
            name = f"{task.name}__{secrets.token_hex(4)}"
            watch = Watch(self.progress.line, self.stop, self.progress.phase, self.progress.session)
            rollout = Rollout(self.plan, task, job.dir.path / name, pool, proxy, watch, retry_of)
            try:
                result = rollout.run()
            except Stopped:
                self.progress.dropped(name)
                return
            except SandboxError as error:  # pragma: no cover - a rollout turns its own failures into results
                self.progress.line(f"[ERROR] {task.name} ({error})")
                return
            again = result["error_category"] in INFRASTRUCTURE or (
                result["verifier_error_category"] in INFRASTRUCTURE and result["rewards"] is None
            )
            last = not again or attempt == self.options.retries
            job.add(result)
            self.progress.done(result, final=last)
            if last:
                if self.options.fail_fast and outcome(result) in ("errored", "verifier_errored"):
                    self.progress.status("stopping at the first rollout without a reward (--fail-fast)")
                    self.stop.set()
                    pool.kill()
                return
            retry_of = name


def default_job_name() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d__%H-%M-%S")
