"""`trl-grpo`: one rollout per row for a GRPO step on what was really sampled, through TRL's `rollout_func`.

`env_mask` is 1 for a sampled id and 0 for one of the environment; `logprobs` is 0.0 where the mask is 0. TRL (1.16)
groups consecutive rows and has no place for a second row of a rollout, so a rollout that branches is left out in row
mode `rollout`. TRL computes the advantage from `reward`; a trainer that takes `advantage` must not normalize it again.
"""

from __future__ import annotations

import math

import orjson

from train.rows.formats.base import Format, Row, TokenExample
from train.rows.formats.trl_sft_ids import check_ids, token_provenance


def row(example: TokenExample) -> Row:
    """P `prompt_ids`; C values each of `completion_ids`, `env_mask` and `logprobs`; `reward`; `advantage` and `group`.

    `advantage` and `group` are null without --group-advantage.
    """
    sequence = example.sequence
    made = {
        "prompt_ids": sequence.prompt_ids.json(),
        "completion_ids": sequence.completion_ids.json(),
        "env_mask": orjson.Fragment(b"[" + sequence.mask_text(b"1", b"0") + b"]"),
        "logprobs": orjson.Fragment(b"[" + sequence.logprobs_text() + b"]"),
        "reward": example.origin.reward,
        "advantage": None,
        "group": None,
    }
    return made | token_provenance(example)


def check(row: Row) -> list[str]:
    """Equal lengths, a mask of 0 and 1, finite logprobs of at most 0, and at least one sampled id."""
    problems = check_ids(row.get("prompt_ids"), "prompt_ids") + check_ids(row.get("completion_ids"), "completion_ids")
    if problems:
        return problems
    length = len(row["completion_ids"])
    for name in ("env_mask", "logprobs"):
        if not isinstance(row.get(name), list):
            problems.append(f"{name} must be a list")
        elif len(row[name]) != length:
            problems.append(f"{name} has {len(row[name])} entries for {length} completion_ids")
    if problems:
        return problems
    if any(value not in (0, 1) for value in row["env_mask"]):
        problems.append("env_mask has values other than 0 and 1")
    elif not any(row["env_mask"]):
        problems.append("no token was sampled")
    for at, (mask, value) in enumerate(zip(row["env_mask"], row["logprobs"], strict=True)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return [*problems, f"logprobs[{at}] is {value!r}, not a finite number"]
        if value > 0 or (value and not mask):
            return [*problems, f"logprobs[{at}] is {value!r} where env_mask is {mask}"]
    for name in ("reward", "advantage"):
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            problems.append(f"{name} must be a number or null")
    return problems


FORMAT = Format(
    name="trl-grpo",
    summary="TRL GRPOTrainer through rollout_func, ids, mask and logprobs, one row per rollout",
    reads="ids",
    trains="sampled",
    row=row,
    check=check,
    one_row_a_rollout=True,
    needs_reward=True,
    notes_sampling=True,
)
