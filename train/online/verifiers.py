"""verifiers and prime-rl: an environment whose rollouts run in `bench serve`. Read in verifiers 0.4.0.

verifiers loads plug-ins from top-level modules. Two lines make one, for example in `benchflow_rollouts.py`:

    from train.online.verifiers import ServiceEnv, ServiceTaskset
    __all__ = ["ServiceEnv", "ServiceTaskset"]

`benchflow_rollouts` is then the id of a taskset, whose environment server returns traces to prime-rl. verifiers' own
harnesses and capture are not used: the service samples from the engine that it was started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from train.errors import TrainError
from train.extras import optional
from train.online.groups import RUN, FinishedGroup, GroupRequest, GroupWithheld, connect, sampling_of, wait_group
from train.online.traces import calls_of, nodes_of

vf: Any = optional(
    "verifiers.v1",
    needed_for="train.online.verifiers needs verifiers",
    install="use it in a run of verifiers 0.4 or prime-rl, with its environment",
)


class ServiceTaskData(vf.TaskData):  # type: ignore[misc]
    """A task of the service: `name` is its name there."""


class ServiceTask(vf.Task[ServiceTaskData]):  # type: ignore[misc]
    """A task of the service; it is set up and scored there."""

    @property
    def key(self) -> str:
        return str(self.data.name)


class ServiceTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Where the service is; its key comes from BENCHFLOW_SERVE_KEY. `deadline` is seconds for one rollout."""

    url: str | None = None
    deadline: float | None = None


class ServiceTaskset(vf.Taskset[ServiceTask, ServiceTasksetConfig]):  # type: ignore[misc]
    """The tasks of the service."""

    def load(self) -> Iterator[ServiceTask]:
        for task in connect(self.config.url).tasks():
            yield ServiceTask(ServiceTaskData(name=task["name"], prompt=task["prompt"] or None), self.config.task)


class ServiceEnv(vf.SingleAgentEnv):  # type: ignore[misc]
    """One rollout of the service per episode: its sequences are the branches of the episode's one trace.

    A rollout that cannot be trained is an episode with an error, which prime-rl leaves out of its group. An episode
    that is cancelled cancels its rollout.
    """

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Nothing is served: the agent's endpoint is the service's own proxy."""
        yield

    async def run_episode(
        self,
        task: Any,
        ctx: Any,
        *,
        on_trace: Callable[[Any], None] | None = None,
        on_discard: Callable[[Any], None] | None = None,
    ) -> Any:
        described = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = self.config.agent.model_copy(
            update={"model": ctx.model, "client": ctx.client, "sampling": ctx.sampling}
        )
        trace = vf.Trace(task=described, agent=vf.AgentInfo(config=agent))
        episode = vf.Episode(env=vf.EnvInfo(id=self.config.env_id), task=described, traces=[trace])
        if on_trace is not None:
            on_trace(trace)
        settings = self.config.taskset
        request = _request(f"verifiers-{RUN}-{episode.id}", task.data.name, ctx, settings.deadline)
        trace.timing.agent.start = time.time()
        try:
            async with asyncio.timeout(self.config.timeout.episode):
                group = await wait_group(connect(settings.url), request)
            _fill(trace, group)
        except TimeoutError:
            trace.record_timeout("agent")
            episode.is_timeout = True
            episode.errors.append(vf.Error(type="TimeoutError", message="the episode's time ran out"))
        except TrainError as error:
            trace.record_error(error)
            episode.errors.extend(trace.errors)
        trace.timing.agent.end = time.time()
        trace.notify()
        episode.ok = trace.ok
        return episode


def _request(key: str, task: str, ctx: Any, deadline: float | None) -> GroupRequest:
    sampling: Mapping[str, Any] = ctx.sampling.model_dump(exclude_none=True)
    # prime-rl sends the policy that is current when it dispatches a rollout, to keep prefix caches apart.
    training = ctx.client.type == "train"
    version = str(sampling.get("cache_salt") or "")
    return GroupRequest(
        key=key,
        size=1,
        task=task,
        sampling=sampling_of(sampling, training=training),
        policy_version=version if version.isdecimal() else None,
        deadline=deadline,
        purpose="train" if training else "eval",
        ratios=sampling.get("temperature", 1.0) if training else None,
        max_output_tokens=sampling.get("max_tokens"),
    )


def _fill(trace: Any, group: FinishedGroup) -> None:
    """Puts the rollout's sequences, calls and reward into the trace. Raises `GroupWithheld`."""
    rows, record = group.rows(0), group.records[0]
    if not rows or record is None:
        raise GroupWithheld(f"the rollout is left out: {group.why(0)}")
    for row in rows:
        first = len(trace.nodes)
        nodes = nodes_of(record, row, first)
        trace.nodes += [vf.MessageNode(**node) for node in nodes]
        trace.calls += [vf.ModelCall(**call) for call in calls_of(record, row, nodes, first)]
    trace.record_reward("reward", record["reward"] or 0.0)
    trace.info |= {"rollout": record["rollout_path"], "policy_versions": [row.policy_versions for row in rows]}
    trace.ok = True
    trace.stop("agent_completed")
