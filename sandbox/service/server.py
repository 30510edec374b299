"""A service from its start to its clean stop: job folder, sandboxes, proxy, HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from capture.journal.layout import JobDir
from sandbox.containers.pool import DockerPool, PoolFactory
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.errors import EngineError, JobError
from sandbox.rollouts.job import check_tasks, job_proxy
from sandbox.rollouts.job_folder import evaluation_json, open_job
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.service.app import ServiceApp
from sandbox.service.group_service import GroupService, ServiceOptions
from sandbox.service.ledger import Ledger
from sandbox.tasks.task import Task


@dataclass(frozen=True)
class ServerOptions:
    """Where a service listens, and how it starts and stops."""

    key: str
    host: str = "127.0.0.1"
    #: 0 takes a free one.
    port: int = 8300
    jobs_dir: Path = Path("jobs")
    resume: bool = False
    #: Seconds that running rollouts have when the service is stopped.
    grace: float = 60.0


def serve(
    plan: RolloutPlan, tasks: Sequence[Task], service_options: ServiceOptions, options: ServerOptions,
    progress: Progress, *, make_pool: PoolFactory = DockerPool, engine: EmbeddedEngine | None = None,
    on_start: Callable[[str, GroupService], None] = lambda _url, _service: None,
) -> int:  # fmt: skip
    """Serves until SIGTERM or Ctrl-C; the exit code. `on_start` gets the address. Raises `JobError`, `TaskError`.

    `engine` is one that runs for this service alone, which may replace its weights.
    """
    check_tasks(plan, tasks)
    listener = listen(options.host, options.port)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        evaluation = evaluation_json(plan, tasks, make_pool.kind, service_options.retries, 1, 1)
        folder = JobDir(options.jobs_dir / plan.job)
        job = stack.enter_context(open_job(folder, evaluation, options.resume))
        pool = make_pool(plan.job, list(tasks), lambda text: progress.status(text) if text else None)
        stack.callback(pool.close)
        proxy = stack.enter_context(job_proxy(plan, pool, progress.status))
        ledger = Ledger(folder)
        if engine is not None and ledger.policy is not None and ledger.policy.get("weights"):
            serve_again(engine, str(ledger.policy["weights"]), progress)
        service = GroupService(plan, tasks, service_options, job, ledger, pool, proxy, progress)
        try:
            app = ServiceApp(service, options.key, engine).app()
            exit_code = asyncio.run(_run(service, app, options, listener, progress, on_start))
        finally:
            left = service.close()
        if left:
            groups = "1 group is" if left == 1 else f"{left} groups are"
            progress.status(f"{groups} not finished; --job {plan.job} --resume continues")
        job.finish(plan, stopped=bool(left))
        return exit_code


def serve_again(engine: EmbeddedEngine, weights: str, progress: Progress) -> None:
    """Has the engine serve what it served when an earlier run ended. Raises `JobError`."""
    try:
        engine.reload(Path(weights))
    except EngineError as error:
        raise JobError(
            f"the weights that this job was served with last cannot be loaded ({error}); put {weights} back, or give "
            "another --job"
        ) from error
    progress.status(f"serving {weights} again, which an earlier run had loaded")


def listen(host: str, port: int) -> socket.socket:
    """Raises `JobError`."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, TypeError, UnicodeError) as error:  # the last two: a name that no host can have
        reason = getattr(error, "strerror", None) or error
        raise JobError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from error


async def _run(
    service: GroupService, app: Starlette, options: ServerOptions, listener: socket.socket, progress: Progress,
    on_start: Callable[[str, GroupService], None],
) -> int:  # fmt: skip
    loop = asyncio.get_running_loop()
    service.waiters.attach(loop)
    ended, exit_code = asyncio.Event(), 0
    hurry = asyncio.Event()

    def on_signal(number: int) -> None:
        nonlocal exit_code
        if ended.is_set():
            hurry.set()
            service.waiters.wake()
        exit_code = exit_code or 128 + number
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    logging.getLogger("uvicorn.error").addFilter(is_fault)
    continued = await asyncio.to_thread(service.resume)
    if continued:
        progress.status(f"{continued} groups of an earlier run continue")
    server = Server(
        uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None,
            access_log=False, proxy_headers=False, server_header=False, timeout_graceful_shutdown=2,
        )
    )  # fmt: skip
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host = f"[{options.host}]" if ":" in options.host else options.host
    on_start(f"http://{host}:{listener.getsockname()[1]}", service)
    stopping = asyncio.create_task(ended.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await _drain(service, options.grace, hurry, progress)
    server.should_exit = True
    await serving
    return exit_code


async def _drain(service: GroupService, grace: float, hurry: asyncio.Event, progress: Progress) -> None:
    """Waits up to `grace` seconds, or until a second signal, for rollouts that run; then ends them."""
    await asyncio.to_thread(service.drain)
    if not service.is_idle():
        progress.status(f"stopping; rollouts that run may end within {grace:g} s, a second Ctrl-C ends them now")
        deadline = asyncio.get_running_loop().time() + grace
        with service.waiters.event() as changed, contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not service.is_idle() and not hurry.is_set():
                    changed.clear()
                    await changed.wait()
    await asyncio.to_thread(service.close)
    service.waiters.wake()


def is_fault(record: logging.LogRecord) -> bool:
    """False for an answer that a stop cuts off, as one to a client that reads slowly: uvicorn logs its traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class Server(uvicorn.Server):
    """Without uvicorn's signal handlers: a stop lets rollouts end first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
