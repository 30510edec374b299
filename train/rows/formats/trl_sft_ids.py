"""`trl-sft-ids`: TRL's SFTTrainer on the very ids that were sampled; nothing is rendered or tokenized again.

TRL (1.16) takes a row with `input_ids` and `labels` as it is, in every mode. A `completion_mask` without `labels` it
ignores unless it is told otherwise, and then every token trains: hence labels.
"""

from __future__ import annotations

import orjson

from train.rows.formats import Format, Row, Tokens, as_text, provenance


def row(example: Tokens) -> Row:
    """`input_ids` (prompt and completion), `labels` (the id where it was sampled, -100 elsewhere), and its origin."""
    sequence = example.sequence
    return {
        "input_ids": (sequence.prompt_ids + sequence.completion_ids).json(),
        "labels": orjson.Fragment(b"[" + sequence.labels_text() + b"]"),
    } | provenance_of_tokens(example)


def provenance_of_tokens(example: Tokens) -> Row:
    """Where a token row comes from; `calls` are the calls' numbers, `lines` their lines in the journal, from 0."""
    sequence = example.sequence
    return provenance(example.origin) | {
        "segment": example.segment,
        "calls": list(sequence.calls),
        "lines": list(sequence.lines),
        "sampled_tokens": sequence.sampled,
        "policy_versions": list(sequence.policy_versions),
        "sampling": as_text(example.sampling),
    }


def check(row: Row) -> list[str]:
    """Lengths, and that a label is the id it stands at or -100."""
    ids, labels = row.get("input_ids"), row.get("labels")
    problems = [*check_ids(ids, "input_ids")]
    if not isinstance(labels, list):
        return [*problems, "labels must be a list"]
    if problems:
        return problems
    assert isinstance(ids, list)
    if len(labels) != len(ids):
        return [f"labels has {len(labels)} entries for {len(ids)} input_ids"]
    for at, (one, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (-100, one):
            return [f"labels[{at}] is {label}, neither -100 nor the id {one} that stands there"]
    if all(label == -100 for label in labels):
        problems.append("no label is trained")
    elif labels[0] != -100:
        problems.append("labels[0] is trained, and nothing comes before it")
    return problems


def check_ids(ids: object, name: str) -> list[str]:
    if not isinstance(ids, list) or not ids:
        return [f"{name} must be a non-empty list of token ids"]
    for at, one in enumerate(ids):
        if type(one) is not int or one < 0:
            return [f"{name}[{at}] is {one!r}, not a token id"]
    return []


FORMAT = Format(
    name="trl-sft-ids",
    says="TRL SFTTrainer, exact ids and labels; sampled tokens only",
    reads="ids",
    trains="sampled",
    row=row,
    check=check,
)
