"""Files of rows that a runner wrote next to its logs, `results.jsonl` and `verifiers.jsonl`, as a source of rows.

Their messages are made from the agent's events: text only, tool calls as text. The job's folder gives better rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capture.journal.files import read_jsonl
from capture.journal.layout import JOURNAL
from capture.journal.trainer_files import EVALUATION_REASON, reward_of_row
from train.errors import BadInput
from train.rollouts.messages import NotChat, plain
from train.rows.examples import redacted
from train.rows.formats.base import ConversationExample, Origin
from train.rows.skip_reasons import OTHER_PURPOSE, Tally


def is_row_file(path: Path) -> bool:
    """Whether the file has rows of rollouts, not calls; its first line decides. Raises `BadInput` for an empty file."""
    if path.name == Path(JOURNAL).name or path.suffix != ".jsonl":
        return False
    for _, row in read_jsonl(path):
        return "prompt" in row and "completion" in row and "request" not in row
    raise BadInput(f"{path} is empty")


def row_file_examples(
    path: Path,
    min_reward: float | None,
    include_errored: bool,
    redact: bool,
    tally: Tally,
    *,
    purpose: str = "train",
) -> Iterator[ConversationExample]:
    """One conversation per row, up to its last reply. `exchange_index` is the row's 0-based number in the file."""
    for number, row in read_jsonl(path):
        tally.rollouts_seen += 1
        info = row["info"] if isinstance(row.get("info"), dict) else {}
        reward = reward_of_row(row)
        reason = _other_purpose(info, purpose) or _why_not(row, info, reward, min_reward, include_errored)
        if reason is not None:
            tally.leave_out(reason)
            continue
        messages = [
            message
            for part in (row.get("prompt"), row.get("completion"))
            for message in (part if isinstance(part, list) else [])
            if isinstance(message, dict)
        ]
        last = max((at for at, message in enumerate(messages) if message.get("role") == "assistant"), default=0)
        try:
            chat = plain(messages[: last + 1]).messages
        except NotChat as error:
            tally.leave_out(error.reason)
            continue
        if not last or chat[last]["role"] != "assistant":
            tally.leave_out("no_assistant")
            continue
        origin = Origin(
            id=_text(info.get("rollout_dir")) or f"{path.stem}-{number}",
            reward=reward,
            task=_text(info.get("task_name")) or _text(info.get("task_id")),
            agent=_text(info.get("agent")),
            model=_text(info.get("model")),
            rollout=_text(info.get("rollout_name")) or f"{path.stem}-{number}",
            rollout_dir=_text(info.get("rollout_dir")) or "",
            journal=str(path),
            result={"error": row.get("error")},
        )
        tools = [tool for tool in row.get("tool_defs") or [] if isinstance(tool, dict)]
        example = ConversationExample(origin, number, "agent", chat[:last], chat[last], tools)
        yield redacted(example) if redact else example


def _other_purpose(info: dict[str, Any], purpose: str) -> str | None:
    own = "eval" if info.get("purpose") == "eval" or info.get("training_ready_reason") == EVALUATION_REASON else "train"
    return None if purpose in ("all", own) else OTHER_PURPOSE[own]


def _why_not(
    row: dict[str, Any], info: dict[str, Any], reward: float | None, min_reward: float | None, include_errored: bool
) -> str | None:
    if row.get("error") is not None or row.get("is_completed") is False or row.get("is_truncated") is True:
        if reward is None:
            return "errored_unscored"
        if not include_errored:
            return "errored"
    elif info.get("training_ready") is False and info.get("training_ready_reason") != EVALUATION_REASON:
        return "not_training_ready"
    if min_reward is not None and (reward is None or reward < min_reward):
        return "below_min_reward"
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
