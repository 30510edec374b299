"""The contents of a rollout's files: `config.json`, `result.json`, `results.jsonl`, `rewards.jsonl`, `timing.json`."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capture.journal import trainer_files
from capture.journal.files import write_json, write_jsonl
from capture.journal.layout import RolloutDir
from sandbox.containers.pool import network_mode
from sandbox.errors import INFRASTRUCTURE, RolloutError
from sandbox.rollouts.plan import RolloutPlan
from sandbox.tasks.task import Task

#: A variable whose name contains one of these is not stored at all.
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "COOKIE", "AUTH", "BEARER", "SESSION")


@dataclass(frozen=True)
class RolloutReport:
    """What is known about a rollout that ended."""

    plan: RolloutPlan
    task: Task
    name: str
    #: The pool's kind: `docker` or `local`.
    environment: str
    started: datetime.datetime
    agent_name: str | None
    rewards: dict[str, Any] | None
    #: The session's counts, as the proxy reports them when it is closed.
    tally: Mapping[str, Any]
    events: list[dict[str, Any]]
    tool_calls: int
    #: `acp` or `scraped`, see `Trajectory.source`.
    trajectory_source: str
    stop_reason: str | None
    error: RolloutError | None
    verifier_error: RolloutError | None
    export_error: str | None
    #: Paths that hardening removed before the verifier ran.
    removed: list[str]
    retry_of: str | None
    #: Seconds by phase.
    timing: dict[str, float]
    #: See `Rollout`.
    group: dict[str, Any] | None = None


def config_json(
    plan: RolloutPlan, task: Task, environment: str, started: datetime.datetime, group: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What was to be done, without secrets. `capture` is listed because its variable's name contains TOKEN."""
    config: dict[str, Any] = {
        "task_path": task.path.name,
        "task_digest": task.digest,
        "agent": plan.agent.name,
        "model": plan.model,
        "environment": environment,
        "sandbox": {"docker_image": task.sandbox.docker_image, "network_mode": network_mode(task)},
        "sandbox_user": task.agent.user or "agent",
        "verifier_sandbox_mode": plan.verifier_mode(task),
        "timeout_sec": plan.budget(task),
        "capture": plan.capture,
        "policy_version": plan.session.policy_version,
        "sampling": plan.session.sampling,
        "controls": plan.controls,
        "purpose": plan.session.purpose,
        "token_in": plan.session.token_in,
        "agent_env": without_secrets(plan.agent_env),
        "started_at": str(started),
    }
    if group is not None:
        config["group"] = group
    return config


def without_secrets(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not any(word in name.upper() for word in SECRET_WORDS)}


def result_json(report: RolloutReport) -> dict[str, Any]:
    """How it went. Unscored is null, never 0; times are local and without a zone, as BenchFlow writes them."""
    tally, events = report.tally, report.events
    calls = int(tally.get("calls", 0))
    prompt, completion = int(tally.get("prompt_tokens", 0)), int(tally.get("completion_tokens", 0))
    timed_out = report.error is not None and report.error.category == "timeout"
    model = report.plan.model
    acp = report.trajectory_source == "acp"
    source = None if not events or not model else ("partial_acp" if timed_out else "acp") if acp else "scraped"
    tools = report.tool_calls
    result: dict[str, Any] = {
        "task_name": report.task.name,
        "rollout_name": report.name,
        "rewards": report.rewards,
        "agent": report.plan.agent.name,
        "agent_name": report.agent_name,
        "model": model,
        "n_tool_calls": tools,
        "n_skill_invocations": 0,
        "n_prompts": 1,
        "agent_result": {
            "n_tool_calls": tools,
            "n_skill_invocations": 0,
            "n_prompts": 1,
            "n_calls": calls,
            "n_input_tokens": prompt if calls else None,
            "n_output_tokens": completion if calls else None,
            "n_cache_read_tokens": None,
            "n_cache_creation_tokens": None,
            "total_tokens": prompt + completion if calls else None,
            "cost_usd": None,
            "usage_source": "provider_response" if calls else "unavailable",
            "price_source": None,
        },
        "final_metrics": {
            "total_prompt_tokens": prompt if calls else None,
            "total_completion_tokens": completion if calls else None,
            "total_cached_tokens": None,
            "total_cost_usd": None,
        },
        "token_capture": {
            "capture": report.plan.capture,
            "calls": calls,
            "complete_calls": int(tally.get("complete_calls", 0)),
            "incomplete": tally.get("incomplete", {}),
        },
        "trajectory_summary": summary_of(events, timed_out, source),
        "usage_tracking": {"endpoint_kind": "sandbox"} if model else None,
        "stop_reason": report.stop_reason,
        "error": _text(report.error),
        "error_category": report.error.category if report.error else None,
        "verifier_error": _text(report.verifier_error),
        "verifier_error_category": report.verifier_error.category if report.verifier_error else None,
        "export_error": report.export_error,
        "partial_trajectory": timed_out,
        "trajectory_source": source,
        "hardening": {"removed": report.removed},
        "policy_version": report.plan.session.policy_version,
        "purpose": report.plan.session.purpose,
        "budget": tally.get("budget"),
        "sandbox": report.environment,
        "task_digest": report.task.digest,
        "retry_of": report.retry_of,
        "started_at": str(report.started),
        "finished_at": str(datetime.datetime.now()),
        "timing": dict(report.timing),
    }
    if report.group is not None:
        result["group"] = report.group
    return result


def summary_of(events: list[dict[str, Any]], partial: bool, source: str | None) -> dict[str, Any]:
    kinds = Counter(event["type"] for event in events)
    known = ("tool_call", "user_message", "agent_message", "agent_thought")
    return {
        "steps": len(events),
        "tool_call_steps": kinds["tool_call"],
        "user_message_steps": kinds["user_message"],
        "agent_message_steps": kinds["agent_message"],
        "agent_thought_steps": kinds["agent_thought"],
        "other_steps": sum(count for kind, count in kinds.items() if kind not in known),
        "event_type_counts": dict(kinds),
        "tool_call_status_counts": dict(Counter(e["status"] for e in events if e["type"] == "tool_call")),
        "partial_trajectory": partial,
        "trajectory_source": source,
    }


def outcome(result: dict[str, Any]) -> str:
    """`passed`, `failed`, `errored` or `verifier_errored`; a reward decides even where there was an error."""
    reward = trainer_files.reward_of(result)
    if reward is not None:
        return "passed" if reward == 1.0 else "failed"
    return "verifier_errored" if result.get("verifier_error") and not result.get("error") else "errored"


def to_be_retried(result: dict[str, Any]) -> bool:
    """Whether infrastructure failed. What the agent did is never retried, and a reward that was read stands, unless the
    engine failed (`api_error`, which the journal proves): then the agent was judged by half its work."""
    if result.get("rewards") is not None:
        return result.get("error_category") == "api_error"
    categories = (result.get("error_category"), result.get("verifier_error_category"))
    return any(category in INFRASTRUCTURE for category in categories if isinstance(category, str))


def write_rollout_files(
    folder: RolloutDir, result: dict[str, Any], events: list[dict[str, Any]], timing: dict[str, float]
) -> None:
    """Everything but `result.json`, which comes last."""
    write_json(folder.timing, timing)
    if result["rewards"] is not None:
        write_jsonl(folder.rewards, _reward_events(result["rewards"]))
    trainer_files.write_verifiers(folder.verifiers, trainer_files.verifiers_row(result, events))
    write_jsonl(folder.results, [trainer_files.results_row(result, events)])


def _reward_events(rewards: dict[str, Any]) -> list[dict[str, Any]]:
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return [
        {
            "ts": now,
            "type": "terminal",
            "source": "verifier",
            "value": rewards["reward"],
            "tag": "reward",
            "step_index": None,
            "space": "output",
            "granularity": "terminal",
            "meta": {},
        }
    ]


def _text(error: Exception | None) -> str | None:
    return None if error is None else str(error)
