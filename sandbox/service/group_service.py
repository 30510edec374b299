"""Accepts groups, runs their rollouts a bounded number at a time, and decides about each group once.

Rollouts run in threads, as those of `bench run` do. What must survive a kill is in the job folder: the ledger, and the
rollouts' own files.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from capture.errors import CaptureError, JournalError
from proxy import Policy, ProxyError, ProxyThread
from sandbox.containers.pool import ContainerPool
from sandbox.errors import JobError, SandboxError
from sandbox.rollouts.attempts import run_attempts
from sandbox.rollouts.job_folder import Job, finished_rollouts
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from sandbox.rollouts.result_files import to_be_retried
from sandbox.rollouts.rollout import Observer, Rollout
from sandbox.service.group_request import GroupRequest, RequestRefused
from sandbox.service.groups import STATES, RolloutGroup, Waiters
from sandbox.service.ledger import Ledger
from sandbox.service.verdict import decide, record_line
from sandbox.tasks.task import Task

#: Seconds between two attempts to end what runs of a stopped group: a container may just be starting.
KILL_AGAIN = 0.3


@dataclass(frozen=True)
class ServiceOptions:
    """How much a service does at once."""

    #: Rollouts that run at once.
    concurrency: int = 4
    #: Rollouts that may wait; a group that does not fit gets 429.
    queue: int = 1024
    #: Further attempts for a rollout whose infrastructure failed.
    retries: int = 0


class GroupService:
    """The groups of one job. Its methods may be called from any thread."""

    def __init__(
        self, plan: RolloutPlan, tasks: Sequence[Task], options: ServiceOptions, job: Job, ledger: Ledger,
        pool: ContainerPool, proxy: ProxyThread | None, progress: Progress,
    ) -> None:  # fmt: skip
        self.plan, self.options, self.job, self.pool, self.proxy = plan, options, job, pool, proxy
        self.tasks = {task.name: task for task in tasks}
        self.groups: dict[str, RolloutGroup] = {}
        self.waiters = Waiters()
        self.policy_version = plan.session.policy_version
        self.draining = False
        #: How often the policy changed; a group remembers it from when it was accepted.
        self._policy_changes = 0
        self._weights: str | None = (ledger.policy or {}).get("weights")
        self._ledger, self._progress = ledger, progress
        self._lock = threading.Lock()
        self._finishing = threading.Lock()
        #: The ledger has policies in the order in which they were applied.
        self._policy_lock = threading.Lock()
        #: Rollouts that wait, and that run.
        self.queued = self.running = 0
        self._executor = ThreadPoolExecutor(max_workers=options.concurrency, thread_name_prefix="rollout")
        self._futures: dict[Future[None], RolloutGroup] = {}

    # Requests of trainers

    def accept(self, body: object) -> RolloutGroup:
        """The group of a request: a new one, or the one that its key names already. Raises `RequestRefused`."""
        request = GroupRequest.read(body, list(self.tasks.values()), self.plan.session)
        with self._lock:
            if (group := self.groups.get(request.key)) is not None:
                if group.request.body != request.body:
                    raise RequestRefused(
                        409,
                        "other_request",
                        f"the key {request.key} names a group that was asked for with other fields",
                    )
                return group
            if self.draining:
                raise RequestRefused(503, "stopping", "the service is being stopped; ask again when it has restarted")
            self._check_queue(request.size)
            try:
                self._ledger.accept(request.body, request.task)
            except JournalError as error:
                raise RequestRefused(507, "not_written", f"the group is not accepted: {error}") from error
            group = self._add(request, self._policy_changes)
            self.queued += request.size
        self._start(group, range(request.size))
        return group

    def _check_queue(self, size: int) -> None:
        if size > self.options.queue:
            raise RequestRefused(
                400, "too_large", f"a group of {size} does not fit into the queue of {self.options.queue} (--queue)"
            )
        if self.queued + size > self.options.queue:
            message = f"{self.queued} rollouts wait and {self.running} run; ask again when some have ended"
            raise RequestRefused(429, "queue_full", message, retry_after=5)

    def group(self, key: str) -> RolloutGroup:
        """Raises `RequestRefused` for a key that names no group."""
        found = self.groups.get(key)
        if found is None:
            raise RequestRefused(404, "unknown_group", f"there is no group {key!r}; ask for one with POST /groups")
        return found

    def cancel(self, key: str) -> RolloutGroup:
        """Stops what runs of a group; its verdict follows when its sandboxes are gone. Raises `RequestRefused`."""
        group = self.group(key)
        if group.verdict is None and not group.cancelled:
            try:
                self._ledger.cancel(key)
            except JournalError as error:
                raise RequestRefused(507, "not_written", f"the group is not cancelled: {error}") from error
            group.cancelled = True
            self._stop(group)
        return group

    def set_policy(self, policy: Policy, weights: str | None = None) -> None:
        """The policy of the calls from now on, of rollouts that run and of later ones.

        `weights`: the file that the service's own engine serves now. Raises `RequestRefused` where it cannot be
        written down: a restart would serve the policy before. Calls are stamped with the new one then only if the
        engine serves it already.
        """
        with self._policy_lock:
            try:
                self._ledger.change_policy(policy.version, policy.model, weights or self._weights)
            except JournalError as error:
                if weights is None:
                    raise RequestRefused(507, "not_written", f"the policy is not changed: {error}") from error
                self._apply(policy)
                message = f"{weights} is served, but a restart would serve the weights before: {error}"
                raise RequestRefused(507, "not_written", message) from error
            self._weights = weights or self._weights
            self._apply(policy)

    def _apply(self, policy: Policy) -> None:
        with self._lock:
            self.policy_version = policy.version
            self._policy_changes += 1
        if self.proxy is not None:
            self.proxy.set_policy(*policy)

    def line(self, group: RolloutGroup, number: int) -> bytes | None:
        """A line of the group's stream, of those before its verdict. Reads files."""
        return record_line(self.job.dir, group.finished[number])

    def status(self) -> dict[str, Any]:
        return {
            "job": self.plan.job,
            "path": str(self.job.dir.path.absolute()),
            "agent": self.plan.agent.name,
            "model": self.plan.model,
            "policy_version": self.policy_version,
            "running": self.running,
            "queued": self.queued,
            "concurrency": self.options.concurrency,
            "queue_limit": self.options.queue,
            "groups": {state: self.count(state) for state in STATES},
            "logprobs": self._logprobs(),
        }

    def _logprobs(self) -> dict[str, str] | None:
        """What the engine's logprobs mean; None without an engine, and while the proxy stops."""
        try:
            return None if self.proxy is None else self.proxy.logprobs()
        except ProxyError:
            return None

    def count(self, state: str) -> int:
        """How many groups are in this state."""
        return sum(group.state == state for group in list(self.groups.values()))

    # Running groups

    def resume(self) -> int:
        """Restores the groups of the ledger; the number of those that continue."""
        if (last := self._ledger.policy) is not None:
            self._apply(Policy(str(last["version"]), last.get("model")))
        results: dict[str, list[dict[str, Any]]] = {}
        for result in finished_rollouts(self.job.dir):
            member = result.get("group")
            if isinstance(member, dict) and isinstance(member.get("key"), str):
                results.setdefault(member["key"], []).append(result)
        order = {name: place for place, name in enumerate(self._ledger.finished)}
        continued = 0
        for key, body in self._ledger.accepted.items():
            request = self._accepted_request(key, body)
            with self._lock:
                group = self._add(request, self._policy_changes if key in self._ledger.accepted_since else -1)
            group.verdict = self._ledger.ended.get(key)
            # As trainers got them; a rollout that finished as the service was killed comes after these.
            for result in sorted(results.get(key, []), key=lambda found: order.get(found["rollout_name"], len(order))):
                index = result["group"].get("index")
                if type(index) is not int or not 0 <= index < request.size:
                    continue
                if to_be_retried(result) and group.verdict is None:
                    group.replaces[index] = result["rollout_name"]
                else:
                    self._finish_member(group, index, result["rollout_name"])
            if group.verdict is None and key in self._ledger.cancelled:
                group.cancelled = True
                self._conclude(group)
            elif group.verdict is None:
                continued += 1
                missing = [index for index, name in enumerate(group.members) if name is None]
                with self._lock:
                    self.queued += len(missing)
                self._start(group, missing)
        return continued

    def _accepted_request(self, key: str, body: dict[str, Any]) -> GroupRequest:
        """The request of the ledger, for the task that it had then. Raises `JobError`."""
        task = self._ledger.tasks.get(key)
        try:
            named = body if task is None else body | {"task": task}
            return replace(GroupRequest.read(named, list(self.tasks.values()), self.plan.session), body=body)
        except RequestRefused as error:
            raise JobError(
                f"the group {key} of {self._ledger.path} cannot be continued ({error}); resume the job with the tasks "
                "that it was started with, or give another --job"
            ) from error

    def _add(self, request: GroupRequest, policy_changes: int) -> RolloutGroup:
        group = RolloutGroup(request, self.tasks[request.task], [None] * request.size, policy_changes)
        self.groups[request.key] = group
        return group

    def _start(self, group: RolloutGroup, indexes: Sequence[int]) -> None:
        group.open_members = len(indexes)
        if not indexes:
            self._conclude(group)
            return
        if group.request.deadline is not None:
            group.timer = threading.Timer(group.request.deadline, self._expire, [group])
            group.timer.daemon = True
            group.timer.start()
        for index in indexes:
            future = self._executor.submit(self._run_member, group, index)
            self._futures[future] = group
            future.add_done_callback(lambda ended: self._futures.pop(ended, None))

    def _run_member(self, group: RolloutGroup, index: int) -> None:
        with self._lock:
            self.queued -= 1
            self.running += 1
        try:
            self._run_rollout(group, index)
        except (SandboxError, CaptureError) as error:
            group.trouble = group.trouble or str(error)
        except Exception as error:
            sentence = f"this should not have happened ({type(error).__name__}: {error}); please report it"
            group.trouble = group.trouble or sentence
        finally:
            with self._lock:
                self.running -= 1
            self._end_members(group, 1)
            self.waiters.wake()

    def _run_rollout(self, group: RolloutGroup, index: int) -> None:
        member = {"key": group.key, "index": index, "size": group.request.size}
        plan = self._plan(group)

        def prepare(name: str, retry_of: str | None) -> Rollout:
            group.running.add(name)
            observer = Observer(self._progress.line, group.stop, self._progress.phase, on_session)
            return Rollout(
                plan, group.task, self.job.dir.rollout(name).path, self.pool, self.proxy, observer, retry_of, member
            )

        def on_session(name: str, session: str) -> None:
            self._progress.session(name, session)
            if self.proxy is not None and self._version(group) != plan.session.policy_version:
                self.proxy.set_policy_version(session, str(self._version(group)))

        def on_end(result: dict[str, Any], final: bool) -> None:
            name = result["rollout_name"]
            group.running.discard(name)
            self.job.add(result)
            self._progress.done(result, final=final)
            if final:
                with self._finishing:  # lines go out in the order that the ledger has
                    with contextlib.suppress(JournalError):  # a full disk, which the group's verdict tells
                        self._ledger.finish(name)
                    self._finish_member(group, index, name)

        def on_stop(name: str) -> None:
            group.running.discard(name)
            self._progress.dropped(name)

        run_attempts(
            group.task.name, prepare, self.options.retries, group.stop, on_end, on_stop, group.replaces.get(index)
        )

    def _plan(self, group: RolloutGroup) -> RolloutPlan:
        own = {**group.request.session, "policy_version": self._version(group)}
        return replace(self.plan, session=self.plan.session.session_options(own))

    def _version(self, group: RolloutGroup) -> str | None:
        """The version that the group named, until a later one was announced to the service."""
        named = group.request.session.get("policy_version")
        return named if named is not None and group.policy_changes == self._policy_changes else self.policy_version

    def _finish_member(self, group: RolloutGroup, index: int, name: str) -> None:
        if not self.job.dir.rollout(name).result.exists():
            group.trouble = group.trouble or f"{name}/result.json could not be written"
            return
        group.members[index] = name
        group.finished.append(name)
        self.waiters.wake()

    def _end_members(self, group: RolloutGroup, count: int) -> None:
        """`count` of its members no longer wait or run; when none does, decides about the group.

        A group that a stop of the service cut short is left for the restart to continue.
        """
        with self._lock:
            group.open_members -= count
            last = group.open_members == 0
        cut_short = self.draining and not group.cancelled and group.trouble is None and None in group.members
        if last and not cut_short:
            self._conclude(group)

    def _conclude(self, group: RolloutGroup) -> None:
        """Decides about a group of which nothing runs."""
        if group.timer is not None:
            group.timer.cancel()
        verdict = decide(self.job.dir, group.request, group.members, cancelled=group.cancelled, trouble=group.trouble)
        try:
            self._ledger.end(verdict)
        except JournalError as error:
            self._progress.status(f"group {group.key}: {error}; a restart decides about it again")
        group.verdict = verdict
        words = verdict["state"] if verdict["detail"] is None else f"{verdict['state']}: {verdict['detail']}"
        self._progress.status(f"group {group.key}: {words}")
        self.waiters.wake()

    # Stopping

    def _expire(self, group: RolloutGroup) -> None:
        if group.verdict is None and not group.stop.is_set():
            group.trouble = f"the group's deadline of {group.request.deadline:g} s passed"
            self._stop(group)

    def _stop(self, group: RolloutGroup) -> None:
        """Ends its rollouts now, also those whose containers are still starting."""
        if not group.stop.is_set():
            group.stop.set()
            threading.Thread(target=self._kill_until_ended, args=[group], name="stopping", daemon=True).start()
            self._withdraw(group)

    def _kill_until_ended(self, group: RolloutGroup) -> None:
        while group.open_members:
            for name in list(group.running):
                self.pool.kill_rollout(name)
            time.sleep(KILL_AGAIN)

    def drain(self) -> None:
        """Accepts no further group and starts no further rollout; those that run continue."""
        with self._lock:
            self.draining = True
        for group in set(self._futures.copy().values()):
            self._withdraw(group)
        self.waiters.wake()

    def _withdraw(self, group: RolloutGroup) -> None:
        """Removes its waiting rollouts from the queue."""
        waiting = [future for future, owner in self._futures.copy().items() if owner is group]
        if count := sum(future.cancel() for future in waiting):
            with self._lock:
                self.queued -= count
            self._end_members(group, count)

    def is_idle(self) -> bool:
        return self.running == 0

    def close(self) -> int:
        """Stops what still runs; the number of groups that a restart with --resume continues."""
        self.drain()
        for group in list(self.groups.values()):
            if group.verdict is None:
                self._stop(group)
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._ledger.close()
        return sum(group.verdict is None for group in self.groups.values())
