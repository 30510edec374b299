"""Images: present, pulled, built from a task's Dockerfile, or built by installing an agent in one.

Each image is built once, however many rollouts wait for it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import docker
import requests
import tenacity

from sandbox.containers.base import run
from sandbox.containers.docker import Container, Limits, docker_errors, inspect_image
from sandbox.errors import ImageError, InstallError
from sandbox.tasks.task import Task

#: Prints a status line; called with "" it raises `Stopped` once the job is stopped.
Report = Callable[[str], None]
_locks: dict[str, threading.Lock] = {}
_locks_lock = threading.Lock()


def ensure_task_image(api: docker.APIClient, task: Task, report: Report) -> str:
    """The name of a task's image, pulled (`docker_image`) or built (Dockerfile) if needed. Raises `ImageError`."""
    if task.sandbox.docker_image:
        return ensure_pulled(api, task.sandbox.docker_image, report)
    assert task.dockerfile is not None
    return build_task_image(api, task, report)


def ensure_pulled(api: docker.APIClient, image: str, report: Report, *, attempts: int = 3) -> str:
    """`image`, pulled if it is missing; three attempts where the registry is at fault."""
    with _image_lock(image):
        if exists(api, image):
            return image
        report(f"pulling {image}")
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(attempts),
            wait=tenacity.wait_exponential(multiplier=2, max=20),
            retry=tenacity.retry_if_exception(_is_transient),
            reraise=True,
        )
        try:
            retrying(_pull, api, image, report)
        except (docker.errors.APIError, _PullFailed) as error:
            raise ImageError(
                f"the image {image} is not on this machine and cannot be pulled ({_short(error)}); "
                f"check the name and try: docker pull {image}"
            ) from error
    return image


class _PullFailed(Exception):
    """A pull that failed after the engine had answered 200."""


def _pull(api: docker.APIClient, image: str, report: Report) -> None:
    repository, _, tag = image.partition("@") if "@" in image else _split_tag(image)
    layers: dict[str, tuple[int, int]] = {}
    reported = time.monotonic()
    for event in api.pull(repository, tag=tag or "latest", stream=True, decode=True):
        report("")
        if "error" in event:
            raise _PullFailed(event["error"])
        progress = event.get("progressDetail") or {}
        if progress.get("total"):
            layers[event["id"]] = (progress.get("current", 0), progress["total"])
        if layers and time.monotonic() - reported > 5:
            reported = time.monotonic()
            done, total = (sum(part) for part in zip(*layers.values(), strict=True))
            report(f"pulling {image}: {done >> 20} of {total >> 20} MB")


def _split_tag(image: str) -> tuple[str, str, str]:
    name, colon, tag = image.rpartition(":")
    return (image, "", "latest") if not colon or "/" in tag else (name, colon, tag)


def _is_transient(error: BaseException) -> bool:
    text = str(error).lower()
    permanent = ("not found", "denied", "unauthorized", "manifest unknown", "invalid reference", "no such host")
    return isinstance(error, docker.errors.APIError | _PullFailed) and not any(word in text for word in permanent)


def build_task_image(api: docker.APIClient, task: Task, report: Report) -> str:
    """Builds the task's Dockerfile as an image named after the task's digest, unless it exists."""
    tag = f"benchflow-task/{task.name.lower()}:{task.digest.removeprefix('sha256:')[:12]}"
    with _image_lock(tag):
        if exists(api, tag):
            return tag
        report(f"building the image of {task.name}")
        deadline = time.monotonic() + task.sandbox.build_timeout_sec
        log: list[str] = []
        try:
            for event in api.build(
                path=str(task.path / "environment"), tag=tag, rm=True, forcerm=True, decode=True,
                labels={"benchflow.task": task.name}, timeout=int(task.sandbox.build_timeout_sec),
            ):  # fmt: skip
                report("")
                log.append(str(event.get("stream") or event.get("error") or ""))
                if "error" in event:
                    raise ImageError(f"the image of task {task.name} cannot be built: {_build_tail(log)}")
                if time.monotonic() > deadline:
                    raise ImageError(
                        f"building the image of task {task.name} took more than {task.sandbox.build_timeout_sec:g} s; "
                        "raise sandbox.build_timeout_sec"
                    )
        except (docker.errors.DockerException, requests.exceptions.RequestException, TypeError) as error:
            raise ImageError(f"the image of task {task.name} cannot be built: {_short(error)}") from error
    return tag


def _build_tail(log: list[str]) -> str:
    tail = " / ".join(line.strip() for line in "".join(log[-12:]).splitlines() if line.strip())[-500:]
    if "--mount" in tail or "unknown instruction" in tail.lower():
        tail += " (the Dockerfile may need BuildKit: build it with docker build -t NAME and set sandbox.docker_image)"
    return tail


def build_agent_image(
    api: docker.APIClient,
    base: str,
    *,
    key: str,
    install: Callable[[Container], None],
    labels: Mapping[str, str],
    tag: str | None = None,
    report: Report = lambda _: None,
) -> str:
    """Installs an agent in `base` and saves the image under `key` and the base's id, unless that image exists.

    `install` runs on Docker's default network, where it reaches package registries. Raises `InstallError`.
    """
    with docker_errors(f"look at the image {base}"):
        base_id = inspect_image(api, base)["Id"].removeprefix("sha256:")[:12]
    image = tag or f"benchflow-agent/{key}:{base_id}"
    with _image_lock(image):
        if exists(api, image) and (tag is None or _agent_and_base(api, image) == [key, base_id]):
            return image
        report(f"installing {key} in {base}, once")
        sandbox = Container.start(
            api,
            base,
            name=f"benchflow-build-{key}-{base_id}-{time.time_ns() & 0xFFFFFF:06x}",
            limits=Limits(cpus=8, memory_mb=4096, storage_mb=20480, pids=4096),
            labels=labels,
            network="bridge",
        )
        try:
            install(sandbox)
            repository, _, version = _split_tag(image)
            run(sandbox, ["sh", "-c", "rm -rf /tmp/* /root/.npm /root/.cache 2>/dev/null; true"])
            changes = [f'LABEL benchflow.agent="{key}"', f'LABEL benchflow.base="{base_id}"']
            changes += _original_command(inspect_image(api, base)["Config"] or {})
            with docker_errors(f"save the image {image}"):
                # An empty list: a commit that names no entry point keeps our container's.
                api.commit(sandbox.id, repository=repository, tag=version, conf={"Entrypoint": []}, changes=changes)
        except requests.exceptions.RequestException as error:
            raise InstallError(f"{key} cannot be installed in {base}: {_short(error)}") from error
        finally:
            sandbox.remove()
    return image


def _original_command(config: dict[str, Any]) -> list[str]:
    """Instructions that restore the base's command: a commit keeps the one of our container."""
    entrypoint = config.get("Entrypoint")
    return [
        *([f"ENTRYPOINT {json.dumps(entrypoint)}"] if entrypoint else []),
        f"CMD {json.dumps(config.get('Cmd') or [])}",
        f"WORKDIR {config.get('WorkingDir') or '/'}",
    ]


def _agent_and_base(api: docker.APIClient, image: str) -> list[str]:
    labels = (inspect_image(api, image)["Config"] or {}).get("Labels") or {}
    return [labels.get("benchflow.agent", ""), labels.get("benchflow.base", "")]


def exists(api: docker.APIClient, image: str) -> bool:
    with docker_errors(f"look for the image {image}"):
        try:
            inspect_image(api, image)
        except docker.errors.ImageNotFound:
            return False
    return True


@contextlib.contextmanager
def _image_lock(name: str) -> Iterator[None]:
    with _locks_lock:
        lock = _locks.setdefault(name, threading.Lock())
    with lock:
        yield


def _short(error: Exception) -> str:
    return " ".join(str(getattr(error, "explanation", None) or error).split())[:300]
