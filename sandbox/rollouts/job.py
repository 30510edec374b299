"""Many rollouts: tasks × trials, several at once, with retries after infrastructure failures."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from capture.journal.layout import JobDir, trial_name
from proxy import ProxyError, ProxyThread, Settings
from sandbox.containers.pool import ContainerPool, DockerPool, PoolFactory
from sandbox.errors import JobError, Stopped
from sandbox.rollouts.attempts import run_attempts
from sandbox.rollouts.job_folder import Job, evaluation_json, open_job
from sandbox.rollouts.model_endpoint import refuse_leak
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.rollouts.result_files import outcome
from sandbox.rollouts.rollout import Observer, Rollout
from sandbox.tasks.task import Task


@dataclass(frozen=True)
class JobOptions:
    """How a job is run."""

    jobs_dir: Path = Path("jobs")
    trials: int = 1
    concurrency: int = 4
    #: Further attempts for a rollout whose infrastructure failed.
    retries: int = 0
    resume: bool = False
    #: Stop at the first rollout without a reward.
    fail_fast: bool = False


@dataclass
class JobOutcome:
    """How a run ended: one summary per trial, in order."""

    summaries: list[dict[str, Any]] = field(default_factory=list)
    stopped: bool = False

    @property
    def unscored(self) -> int:
        return sum(summary["errored"] + summary["verifier_errored"] for summary in self.summaries)


def run_job(
    plan: RolloutPlan,
    tasks: Sequence[Task],
    options: JobOptions,
    progress: Progress,
    *,
    stop: threading.Event | None = None,
    make_pool: PoolFactory = DockerPool,
    on_pool: Callable[[ContainerPool], None] = lambda _: None,
) -> JobOutcome:
    """Runs every task in every trial and writes the job folders. `stop`, set from outside, ends it early and cleanly.

    Raises `JobError` or `TaskError` before the first rollout; what goes wrong later is in the results.
    """
    stop = stop or threading.Event()
    check_tasks(plan, tasks)
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                open_job(
                    folder,
                    evaluation_json(plan, tasks, make_pool.kind, options.retries, trial, options.trials),
                    options.resume,
                )
            )
            for trial, folder in enumerate(job_folders(plan.job, options), 1)
        ]
        run = _JobRun(plan, list(tasks), options, progress, stop)
        pool = make_pool(plan.job, run.tasks, run.report)
        stack.callback(pool.close)
        on_pool(pool)
        with job_proxy(plan, pool, progress.status) as proxy:
            run.run_all(jobs, pool, proxy)
        stopped = stop.is_set()
        return JobOutcome([job.finish(plan, stopped=stopped) for job in jobs], stopped)


def job_folders(job: str, options: JobOptions) -> list[JobDir]:
    """`<jobs-dir>/<job>`, or one below `trial-01` and so on for each of several trials."""
    if options.trials == 1:
        return [JobDir(options.jobs_dir / job)]
    return [JobDir(options.jobs_dir / trial_name(n) / job) for n in range(1, options.trials + 1)]


def check_tasks(plan: RolloutPlan, tasks: Sequence[Task]) -> None:
    if not tasks:
        raise JobError("there is no task to run")
    for env in (plan.agent_env, *(task.sandbox.env for task in tasks)):
        if plan.provider is not None:
            refuse_leak(plan.provider, env)
    for task in tasks:
        plan.agent.check_task(task)


@contextlib.contextmanager
def job_proxy(plan: RolloutPlan, pool: ContainerPool, warn: Callable[[str], None]) -> Iterator[ProxyThread | None]:
    """One proxy for a whole job, listening only where the sandboxes reach it; None where no model is needed."""
    provider = plan.provider
    if not plan.agent.needs_model or provider is None:
        for warning in pool.close_host([]):
            warn(warning)
        yield None
        return
    first, *more = pool.listen_addresses()
    session = replace(
        plan.session, upstream=[provider.base_url], upstream_key=provider.api_key, engine=provider.engine,
        model=provider.served, capture=provider.capture, top_logprobs=provider.top_logprobs,
    )  # fmt: skip
    settings = Settings.of(session, host=first, more_hosts=more, probe=False, measure_logprobs=True, grace=10.0)
    try:
        with ProxyThread(settings) as proxy:
            for warning in pool.close_host([proxy.port]):
                warn(warning)
            yield proxy
    except ProxyError as error:
        raise JobError(f"the proxy cannot be started: {error}") from error


class _JobRun:
    def __init__(
        self, plan: RolloutPlan, tasks: list[Task], options: JobOptions, progress: Progress, stop: threading.Event
    ) -> None:
        self.plan, self.tasks, self.options, self.progress, self.stop = plan, tasks, options, progress, stop

    def report(self, text: str) -> None:
        """Prints a status line, if any. Raises `Stopped` once the job is stopped."""
        if self.stop.is_set():
            raise Stopped("the job was stopped")
        if text:
            self.progress.status(text)

    def run_all(self, jobs: list[Job], pool: ContainerPool, proxy: ProxyThread | None) -> None:
        work = [(job, task) for job in jobs for task in self.tasks if not job.is_finished(task.name)]
        finished = len(jobs) * len(self.tasks) - len(work)
        if finished:
            self.progress.status(f"{finished} finished rollouts are kept")
        self.progress.begin(len(work), proxy)
        executor = ThreadPoolExecutor(max_workers=self.options.concurrency, thread_name_prefix="rollout")
        try:
            running = [executor.submit(self.run_task, job, task, pool, proxy) for job, task in work]
            for future in as_completed(running):
                future.result()
        finally:
            self.progress.end()
            executor.shutdown(wait=True, cancel_futures=True)

    def run_task(self, job: Job, task: Task, pool: ContainerPool, proxy: ProxyThread | None) -> None:
        """Runs a task, again while its infrastructure fails and retries are left."""

        def prepare(name: str, retry_of: str | None) -> Rollout:
            observer = Observer(self.progress.line, self.stop, self.progress.phase, self.progress.session)
            return Rollout(self.plan, task, job.dir.path / name, pool, proxy, observer, retry_of)

        def on_end(result: dict[str, Any], final: bool) -> None:
            job.add(result)
            self.progress.done(result, final=final)

        result = run_attempts(
            task.name, prepare, self.options.retries, self.stop, on_end, self.progress.dropped,
            job.to_replace(task.name),
        )  # fmt: skip
        if result is not None and self.options.fail_fast and outcome(result) in ("errored", "verifier_errored"):
            self.progress.status("stopping at the first rollout without a reward (--fail-fast)")
            self.stop.set()
            pool.kill()


def default_job_name() -> str:
    return datetime.datetime.now().strftime("%Y-%m-%d__%H-%M-%S")
