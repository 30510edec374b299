"""OpenEnv 0.10's sessions over a rollout service, for trainers that drive those, such as TRL's `HarnessRolloutWorker`.

    worker = HarnessRolloutWorker(
        harness_session_factory=functools.partial(SessionFactory, "http://127.0.0.1:8300", "KEY"), ...
    )

A session is one rollout: a group of one, whose key is the episode's id. OpenEnv is imported when a factory is made. TRL
stops its whole run for a session whose trace raises `ValueError`, `TypeError` or `KeyError`, so a rollout that failed
has an empty trace and no reward instead, which TRL leaves out of the group's baseline.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from train.errors import BadInput, ServiceBusy, TrainError
from train.extras import optional
from train.online.chat import choices_of, messages_of, tools_of
from train.online.client import RolloutService
from train.online.rows import CallSpan, Row, rows_of
from train.online.task_choice import TaskChoice
from train.stream.records import RolloutRecord
from train.tokens.ratio import ratio_ready

log = logging.getLogger(__name__)

NEEDED_FOR = "OpenEnv sessions need openenv 0.10"
#: How long `close` waits for a service that does not answer.
CANCEL_SECONDS = 5.0


class SessionFactory:
    """OpenEnv's `ResourceSessionFactory`: `create` starts a rollout at the service. It can be pickled.

    `sampling` is what the trainer demands; it wins over what the agent asks for. `deadline` is in seconds, of one
    rollout with its time in the queue. `group` holds further fields of `RolloutService.group`, such as `max_calls`.
    A task is chosen by the prompt, where that is a task's name or prompt, and by the seed otherwise, which is the same
    for all rollouts of a trainer's group.

    Raises `ServiceUnavailable` and `ServiceRefused` at once where the service does not answer or refuses the key.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        sampling: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        **group: Any,
    ) -> None:
        harness = optional("openenv.core.harness", needed_for=NEEDED_FOR, extra="openenv")
        # Only the methods are needed; OpenEnv's own helpers ask with isinstance.
        harness.ResourceSessionFactory.register(SessionFactory)
        harness.ResourceSession.register(Session)
        self._group = {**group, "sampling": dict(sampling) if sampling else None, "deadline": deadline}
        self._service = RolloutService(url, key)
        self._impatient = RolloutService(url, key, timeout=CANCEL_SECONDS, patience=CANCEL_SECONDS)
        tasks = self._service.tasks()
        if not tasks:
            raise BadInput(f"the rollout service at {url} has no tasks: start it with a folder of tasks")
        self._tasks = TaskChoice(tasks)
        self._prompts = {str(task["name"]): str(task.get("prompt") or "") for task in tasks}

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Session:
        """Starts one rollout. `task` is the prompt of the trainer's row."""
        name = self._tasks.find(task)
        if name is None and seed is None:
            name = self._tasks.named(task)
        fields = {**self._group, "task": name, "seed": None if name else seed}
        key, prompt = episode_id or uuid.uuid4().hex, self._prompts.get(name or "", "")
        return Session(self._service, self._impatient, key, fields, prompt)


class Session:
    """OpenEnv's `TrainableSession`: one rollout of the service, which its agent drives on its own."""

    def __init__(
        self, service: RolloutService, impatient: RolloutService, key: str, group: Mapping[str, Any], prompt: str = ""
    ) -> None:
        self._service, self._impatient, self._key, self._group, self._prompt = service, impatient, key, group, prompt
        self._record: RolloutRecord | None = None
        self._failure: str | None = None
        self._closed = threading.Event()
        self._finished = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"rollout {key}", daemon=True)
        self._reader.start()

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Waits for the rollout; 0 where its agent ended by itself, else 1.

        Raises `TimeoutError` where `timeout_s` or the rollout's own time ran out: trainers flag the rollout, and train
        on the turns that there are.
        """
        if not self._finished.wait(timeout_s):
            self._cancel()
            raise TimeoutError(f"rollout {self._key} did not end within {timeout_s:g} s and was cancelled")
        if self._record is None:
            if not self._closed.is_set():
                log.warning("rollout %s has no result: %s", self._key, self._failure)
            return 1
        if self._record.get("error_category") == "timeout":
            raise TimeoutError(self._record["error"] or f"rollout {self._key} ran out of time")
        return 0 if self._record["error"] is None else 1

    def fetch_training_trace(self) -> Any:
        """An OpenEnv `TrainingTrace`: the calls that are trained, conversation by conversation; empty for none."""
        kind = optional("openenv.core.harness.training", "TrainingTrace", needed_for=NEEDED_FOR, extra="openenv")
        temperature = (self._group.get("sampling") or {}).get("temperature")
        turns = () if self._record is None else training_turns(self._record, temperature)
        return kind(turns=list(turns))

    def verify(self, transcript: list[dict[str, Any]], final_state: Any = None) -> Any:
        """An OpenEnv `VerifyResult` with the task's own reward; None for a rollout that was not scored, never 0."""
        kind = optional("openenv.core.harness", "VerifyResult", needed_for=NEEDED_FOR, extra="openenv")
        if self._record is None:
            return kind(env_reward=None, done=True, artifacts={"error": self._failure})
        record = self._record
        found = {name: record.get(name) for name in ("job", "rollout_path", "task", "outcome", "error")}
        return kind(env_reward=record["reward"], done=True, artifacts=found)

    def close(self) -> None:
        """Ends the session from any thread: a rollout that runs is cancelled, and whoever waits for it returns."""
        if self._closed.is_set():
            return
        self._closed.set()
        if not self._finished.is_set():
            self._finished.set()
            self._cancel()

    def initial_messages(self) -> list[dict[str, Any]]:
        """The task's prompt. The agent reads it in its sandbox; trainers that drive rollouts themselves ask for it."""
        return [{"role": "user", "content": self._prompt}]

    def list_tools(self) -> list[Any]:
        """None: the agent has its tools in its sandbox."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """An OpenEnv `ToolResult` with an error: the agent calls its tools itself."""
        kind = optional("openenv.core.harness", "ToolResult", needed_for=NEEDED_FOR, extra="openenv")
        return kind(error=f"there is no tool {name!r} here: the rollout's agent calls its tools in its sandbox")

    def _read(self) -> None:
        try:
            self._failure = self._follow()
        except TrainError as error:
            self._failure = str(error)
        except Exception as error:  # whatever it is, the trainer's run must continue
            log.exception("rollout %s: its group cannot be read", self._key)
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._finished.set()

    def _follow(self) -> str | None:
        """Reads the group; why there is no record, where there is none."""
        while not self._closed.is_set():
            try:
                group = self._service.group(key=self._key, size=1, **self._group)
            except ServiceBusy:  # many more rollouts than the service runs at once: they wait their turn
                continue
            with group:
                if self._closed.is_set():  # closed while the request was on its way
                    self._cancel()
                    break
                for record in group:
                    self._record = record
            verdict = group.verdict
            return None if verdict is None else verdict["detail"] or f"its group is {verdict['state']}"
        return "the session was closed"

    def _cancel(self) -> None:
        try:
            self._impatient.cancel(self._key)
        except TrainError as error:
            log.info("rollout %s was not cancelled: %s", self._key, error)


def training_turns(record: RolloutRecord, temperature: float | None) -> Iterator[Any]:
    """An OpenEnv `TrainingTurn` per call that is trained: the calls of one conversation after another.

    TRL compares a turn with the last row only, so that two agents' calls in the order in which they were made would
    give a row per call. The conversation that ended last comes last: its reply is the transcript's end. A call on whose
    logprobs a trainer with this temperature can build no ratio is context only: its mask is 0.
    """
    kind = optional("openenv.core.harness.training", "TrainingTurn", needed_for=NEEDED_FOR, extra="openenv")
    for fields in turn_fields(record, temperature):
        try:
            turn = kind(**fields)
        except ValueError as error:  # pydantic's; the rest of the rollout is as good as before
            log.warning("%s: call %s is left out: %s", record["rollout"], fields["node_id"], _first_lines(error))
            continue
        yield turn


def turn_fields(record: RolloutRecord, temperature: float | None = None) -> Iterator[dict[str, Any]]:
    """The fields of each `TrainingTurn`, in order."""
    calls = {call["index"]: call for call in record["calls"]}
    for row in sorted(rows_of(record), key=lambda row: max(span.call for span in row.spans)):
        for span in row.spans:
            call: Mapping[str, Any] = calls.get(span.call, {})
            why = None if temperature is None else ratio_ready(call, temperature)
            if why is not None:
                _warn_once(f"{record['rollout']}: call {span.call} and others like it are not trained", why)
            yield _turn(record, row, span, call, trained=why is None)


def _turn(record: RolloutRecord, row: Row, span: CallSpan, call: Mapping[str, Any], *, trained: bool) -> dict[str, Any]:
    end = span.offset + span.length
    prompt = [*row.prompt_ids, *row.completion_ids[: span.offset]]
    sampled, logprobs = row.completion_ids[span.offset : end], row.logprobs[span.offset : end]
    choices = choices_of(record, span.call)
    position = _choice(call, sampled)
    return {
        "node_id": f"{record['rollout']}:{row.thread}:{span.call}",
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        # An engine's rounding may be above 0, which OpenEnv refuses; a call with more than that is not complete.
        "per_token_logps": [min(float(value), 0.0) for value in logprobs],
        "loss_mask": [0] * len(prompt) + [int(trained)] * len(sampled),
        "request": {"messages": messages_of(record, span.call), "tools": tools_of(record, span.call) or None},
        "response": {"choices": choices[position : position + 1]},
        "metadata": {
            "index": span.call,
            "thread": row.thread,
            "model": record["model"],
            "sampling_params": (call.get("sampling") or {}).get("sent") or {},
            "not_plain": call.get("not_plain") or [],
            "policy_version": span.policy_version,
            "policy_version_end": span.policy_version_end,
        },
    }


def _choice(call: Mapping[str, Any], sampled: list[int]) -> int:
    """The position of the choice that sampled these ids."""
    for position, completion in enumerate(call.get("completions") or ()):
        if completion["token_ids"] == sampled:
            return position
    return 0


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__


_warned: set[str] = set()


def _warn_once(text: str, reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        log.warning("%s: %s", text, reason)
