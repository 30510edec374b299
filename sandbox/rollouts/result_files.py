"""What a rollout's files say: `config.json`, `result.json`, `results.jsonl`, `rewards.jsonl`, `timing.json`."""

from __future__ import annotations

import datetime
from collections import Counter
from typing import TYPE_CHECKING, Any

from capture.journal import trainer_files
from capture.journal.files import write_json, write_jsonl
from capture.journal.layout import RolloutDir
from sandbox.containers.pool import network_mode

if TYPE_CHECKING:
    from sandbox.rollouts.rollout import Rollout

#: A variable whose name holds one of these is dropped from what is stored, not masked.
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "COOKIE", "AUTH", "BEARER", "SESSION")


def config_json(rollout: Rollout) -> dict[str, Any]:
    """What was to be done, without a secret. `capture` is here because its variable's name holds TOKEN."""
    plan, task = rollout.plan, rollout.task
    return {
        "task_path": task.path.name,
        "task_digest": task.digest,
        "agent": plan.agent.name,
        "model": plan.provider.model if plan.provider else None,
        "environment": rollout.pool.kind,
        "sandbox": {"docker_image": task.sandbox.docker_image, "network_mode": network_mode(task)},
        "sandbox_user": task.agent.user or "agent",
        "verifier_sandbox_mode": plan.verifier_sandbox or task.verifier.sandbox_mode or "shared",
        "timeout_sec": plan.budget(task),
        "capture": bool(plan.provider and plan.provider.capture),
        "policy_version": plan.session.policy_version,
        "sampling": plan.session.sampling,
        "token_in": plan.session.token_in,
        "agent_env": without_secrets(plan.agent_env),
        "started_at": str(rollout.started),
    }


def without_secrets(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not any(word in name.upper() for word in SECRET_WORDS)}


def result_json(rollout: Rollout) -> dict[str, Any]:
    """How it went. Unscored is null, never 0; times are local and without a zone, as BenchFlow writes them."""
    tally, events = rollout.tally, rollout.trajectory.events
    calls = int(tally.get("calls", 0))
    prompt, completion = int(tally.get("prompt_tokens", 0)), int(tally.get("completion_tokens", 0))
    timed_out = rollout.error is not None and rollout.error.category == "timeout"
    model = rollout.plan.provider.model if rollout.plan.provider else None
    acp = rollout.trajectory.source == "acp"
    source = None if not events or not model else ("partial_acp" if timed_out else "acp") if acp else "scraped"
    tools = rollout.trajectory.tool_calls
    result: dict[str, Any] = {
        "task_name": rollout.task.name,
        "rollout_name": rollout.dir.name,
        "rewards": rollout.rewards,
        "agent": rollout.plan.agent.name,
        "agent_name": rollout.agent_name,
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
            "capture": bool(rollout.plan.provider and rollout.plan.provider.capture),
            "calls": calls,
            "complete_calls": int(tally.get("complete_calls", 0)),
            "incomplete": tally.get("incomplete", {}),
        },
        "trajectory_summary": summary_of(events, timed_out, source),
        "usage_tracking": {"endpoint_kind": "sandbox"} if model else None,
        "stop_reason": rollout.stop_reason,
        "error": _text(rollout.error),
        "error_category": rollout.error.category if rollout.error else None,
        "verifier_error": _text(rollout.verifier_error),
        "verifier_error_category": rollout.verifier_error.category if rollout.verifier_error else None,
        "export_error": rollout.export_error,
        "partial_trajectory": timed_out,
        "trajectory_source": source,
        "hardening": {"removed": rollout.cleaned},
        "policy_version": rollout.plan.session.policy_version,
        "sandbox": rollout.pool.kind,
        "task_digest": rollout.task.digest,
        "retry_of": rollout.retry_of,
        "started_at": str(rollout.started),
        "finished_at": str(datetime.datetime.now()),
        "timing": dict(rollout.timing),
    }
    return result


def summary_of(events: list[dict[str, Any]], partial: bool, source: str | None) -> dict[str, Any]:
    kinds = Counter(event["type"] for event in events)
    told = ("tool_call", "user_message", "agent_message", "agent_thought")
    return {
        "steps": len(events),
        "tool_call_steps": kinds["tool_call"],
        "user_message_steps": kinds["user_message"],
        "agent_message_steps": kinds["agent_message"],
        "agent_thought_steps": kinds["agent_thought"],
        "other_steps": sum(count for kind, count in kinds.items() if kind not in told),
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
