"""`bench serve` with plain folders in place of containers, as a process: `python -m tests.sandbox.service.local_service
ENGINE JOBS_DIR TASKS OPTIONS`. The double is the pool alone; `test_in_docker.py` stands beside it.

The first line of standard output is the address.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from proxy import SessionOptions
from sandbox.agents import find_agent
from sandbox.containers.local import LocalPool
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.rollouts.model_endpoint import Provider
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.service.group_service import ServiceOptions
from sandbox.service.server import ServerOptions, serve
from sandbox.tasks.task import find_tasks
from tests.sandbox.scripted_engine import MODEL

KEY = "service-key"


def main(engine: str, jobs_dir: str, tasks: str, options: str) -> int:
    given = json.loads(options)
    stack = contextlib.ExitStack()
    own = given.pop("gguf", None)
    loaded = stack.enter_context(EmbeddedEngine(Path(own), slots=2, n_ctx=4096)) if own else None
    served = loaded.model if loaded else MODEL
    name = "llamacpp" if loaded else "vllm"
    plan = RolloutPlan(
        job="job",
        agent=find_agent("mini"),
        provider=Provider(f"{name}/{served}", name, served, loaded.base_url if loaded else engine, None, capture=True),
        session=SessionOptions(policy_version="0"),
        timeout=given.pop("timeout", None),
        agent_env=given.pop("agent_env", {}),
    )
    service = ServiceOptions(**{name: given.pop(name) for name in ("concurrency", "queue", "retries") if name in given})
    server = ServerOptions(key=KEY, port=0, jobs_dir=Path(jobs_dir), **given)
    with stack:
        return serve(
            plan, find_tasks([tasks]), service, server, Progress(sys.stderr, live=False, command="bench serve"),
            make_pool=LocalPool, engine=loaded, on_start=lambda url, _: print(url, flush=True),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
