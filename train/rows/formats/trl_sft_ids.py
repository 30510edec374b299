"""`trl-sft-ids`: TRL's SFTTrainer on exactly the ids that were sampled; nothing is rendered or re-tokenized.

TRL (1.16) takes a row with `input_ids` and `labels` as it is, in every mode. It ignores a `completion_mask` without
`labels` by default, and then every token trains: hence labels.
"""

from __future__ import annotations

import orjson

from train.rows.formats.base import Format, Row, TokenExample, as_text, provenance


def row(example: TokenExample) -> Row:
    """`input_ids` and `labels`, both of the length of prompt and completion, then the origin.

    A label is the id where it was sampled, and -100 elsewhere.
    """
    sequence = example.sequence
    return {
        "input_ids": (sequence.prompt_ids + sequence.completion_ids).json(),
        "labels": orjson.Fragment(b"[" + sequence.labels_text() + b"]"),
    } | token_provenance(example)


def token_provenance(example: TokenExample) -> Row:
    """Where a token row comes from. `calls` are call numbers, `lines` their 0-based lines in the journal."""
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
    """Equal lengths; each label is the id at its place, or -100."""
    ids, labels = row.get("input_ids"), row.get("labels")
    problems = [*check_ids(ids, "input_ids")]
    if not isinstance(labels, list):
        return [*problems, "labels must be a list"]
    if problems:
        return problems
    assert isinstance(ids, list)
    if len(labels) != len(ids):
        return [f"labels has {len(labels)} entries for {len(ids)} input_ids"]
    for at, (token_id, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (-100, token_id):
            return [f"labels[{at}] is {label}, neither -100 nor the id {token_id} at its place"]
    if all(label == -100 for label in labels):
        problems.append("no label is trained")
    elif labels[0] != -100:
        problems.append("labels[0] is trained, and nothing comes before it")
    return problems


def check_ids(ids: object, name: str) -> list[str]:
    if not isinstance(ids, list) or not ids:
        return [f"{name} must be a non-empty list of token ids"]
    for at, token_id in enumerate(ids):
        if type(token_id) is not int or token_id < 0:
            return [f"{name}[{at}] is {token_id!r}, not a token id"]
    return []


FORMAT = Format(
    name="trl-sft-ids",
    summary="TRL SFTTrainer, exact ids and labels; sampled tokens only",
    reads="ids",
    trains="sampled",
    row=row,
    check=check,
)
