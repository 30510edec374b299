"""What a trainer asks for: one group of rollouts of one task. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proxy import SessionOptions, SettingsError
from sandbox.errors import SandboxError
from sandbox.tasks.task import Task
from train.errors import BadInput
from train.groups.groups import GroupOptions

#: Fields of a request that are options of its rollouts' sessions, under the same name.
SESSION_FIELDS: Final = (
    "policy_version", "purpose", "max_calls", "max_sampled_tokens", "max_seconds", "max_output_tokens",
)  # fmt: skip
FIELDS: Final = frozenset({"key", "task", "seed", "size", "sampling", "deadline", "advantage", *SESSION_FIELDS})
#: Not `.` and `..`, which clients take out of an address.
_KEY: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:-]{1,200}")
#: Seconds: a year.
LONGEST_DEADLINE: Final = 365 * 86400


class RequestRefused(SandboxError):
    """A request that cannot be served: `status` is HTTP's, `code` a word for programs, the text a sentence."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request that can be served. `body` is what the trainer sent, which the same key must repeat."""

    key: str
    task: str
    size: int
    #: Seconds from the acceptance of the request; None: as long as it takes.
    deadline: float | None
    #: What the rollouts' sessions have instead of the service's own options.
    session: dict[str, Any]
    advantage: GroupOptions
    body: dict[str, Any]

    @classmethod
    def read(cls, body: object, tasks: Sequence[Task], options: SessionOptions) -> GroupRequest:
        """Raises `RequestRefused` for the first thing that is wrong."""
        if not isinstance(body, dict):
            raise bad('the request is no JSON object; give {"key": "...", "task": "...", "size": 4}')
        if unknown := sorted(set(body) - FIELDS):
            raise bad(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(FIELDS))}")
        key, size = body.get("key"), body.get("size", 1)
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise bad("`key` must be 1 to 200 letters, digits and ._:- that name this group and no other")
        if type(size) is not int or size < 1:
            raise bad(f"`size` must be a whole number of rollouts, at least 1, not {size!r}")
        return cls(
            key=key,
            task=_task(body, tasks),
            size=size,
            deadline=_seconds(body.get("deadline")),
            session=_session(body, options),
            advantage=_advantage(body.get("advantage"), size),
            body=body,
        )

    @property
    def purpose(self) -> str:
        return str(self.body.get("purpose") or "train")


def bad(message: str) -> RequestRefused:
    return RequestRefused(400, "bad_request", message)


def _task(body: Mapping[str, Any], tasks: Sequence[Task]) -> str:
    """The task that is named, or that the seed picks."""
    name, seed = body.get("task"), body.get("seed")
    if name is None:
        if type(seed) is not int:
            raise bad("give the name of a `task`, or a whole number as `seed` that picks one")
        return tasks[seed % len(tasks)].name
    if name not in (task.name for task in tasks):
        names = [task.name for task in tasks]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise RequestRefused(404, "unknown_task", f"there is no task {name!r} here; this service has {shown}")
    return str(name)


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LONGEST_DEADLINE:
        raise bad(f"`deadline` must be a number of seconds above 0 and at most {LONGEST_DEADLINE}, not {value!r}")
    return float(value)


def _session(body: Mapping[str, Any], options: SessionOptions) -> dict[str, Any]:
    own = {name: body[name] for name in SESSION_FIELDS if body.get(name) is not None}
    if type(own.get("policy_version")) is int:
        own["policy_version"] = str(own["policy_version"])
    if body.get("sampling") is not None:
        forced = body["sampling"]
        own["force_sampling"] = options.force_sampling | forced if isinstance(forced, dict) else forced
    try:
        options.session_options(own)
    except SettingsError as error:
        raise bad(str(error)) from error
    return own


def _advantage(value: object, size: int) -> GroupOptions:
    given = value if value is not None else {}
    if not isinstance(given, dict) or not set(given) <= {"kind", "ddof", "eps"}:
        raise bad('`advantage` must be an object such as {"kind": "grpo", "ddof": 1, "eps": 0.0001}')
    options = GroupOptions(size=size, **given)
    if type(options.kind) is not str or type(options.ddof) is not int or type(options.eps) not in (int, float):
        raise bad("`advantage`: `kind` must be a name, `ddof` 0 or 1, and `eps` a number")
    try:
        options.check()
    except BadInput as error:
        raise bad(str(error)) from error
    return options
