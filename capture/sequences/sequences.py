"""Calls of a rollout as token sequences: what was sampled and its context, merged as long as the tokens continue.

Calls form a tree (`capture.threads`); each leaf is one sequence, from the first prompt of its thread to its last
sampled id. Where two leaves share a call, its sampled ids are trained in the first of them and are context in the
other, so no sampled id counts twice. Nothing here parses a prompt: ids stay text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from capture.record import Completion, Ids
from capture.sequences.threads import Placement
from capture.sequences.versions import VersionRange, VersionSpan, version_spans

#: Kinds of calls that serve the agent but are not its own work: they never break its sequence.
SIDE_KINDS = frozenset({"helper", "title", "summary", "compaction"})
#: Kinds that are trained on.
TRAINABLE_KINDS = frozenset({"agent", "chat"})


@dataclass(frozen=True, slots=True)
class Turn:
    """A complete call: its prompt and its choices, each with ids and logprobs. `line` is its line in the journal."""

    call: int
    line: int
    prompt: Ids
    choices: Sequence[Completion]
    kind: str = "agent"
    #: The versions of the weights while the call ran, in order.
    policy_versions: tuple[str, ...] = ()
    #: Per choice, which version sampled which of its ids, where the engine said so.
    version_ranges: Sequence[Sequence[VersionRange]] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """`length` sampled ids of call number `call`, from index `offset` of `completion_ids` on."""

    call: int
    line: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One row for a trainer: `prompt_ids`, then `completion_ids`, of which the ids in `spans` were sampled.

    `logprobs` has one number per id in `spans`, in order. Ids outside of `spans` are the environment's (tool results,
    template tokens) or are trained in another sequence: mask 0, logprob 0.0.
    """

    thread: int
    kind: str
    calls: tuple[int, ...]
    lines: tuple[int, ...]
    prompt_ids: Ids
    completion_ids: Ids
    spans: tuple[Span, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[str, ...] = ()
    #: One or more per span; empty where nobody told a version.
    version_spans: tuple[VersionSpan, ...] = ()

    @property
    def sampled(self) -> int:
        """How many ids are trained on."""
        return len(self.logprobs)

    @property
    def completion_mask(self) -> list[int]:
        """One number per id of `completion_ids`: 1 for a sampled one, else 0."""
        return list(self.mask_text(b"1", b"0").replace(b",", b"").translate(_BITS))

    @property
    def completion_logprobs(self) -> list[float]:
        """One number per id of `completion_ids`: the recorded logprob, 0.0 where the mask is 0."""
        filled = [0.0] * len(self.completion_ids)
        at = 0
        for span in self.spans:
            filled[span.offset : span.offset + span.length] = self.logprobs[at : at + span.length]
            at += span.length
        return filled

    def mask_text(self, sampled: bytes, other: bytes) -> bytes:
        """The inside of a JSON array, one value per id of `completion_ids`, without building a list."""
        parts: list[bytes] = []
        at = 0
        for span in self.spans:
            parts += [(other + b",") * (span.offset - at), (sampled + b",") * span.length]
            at = span.offset + span.length
        parts.append((other + b",") * (len(self.completion_ids) - at))
        return b"".join(parts)[:-1]

    def logprobs_text(self) -> bytes:
        """`completion_logprobs` as the inside of a JSON array."""
        parts: list[bytes] = []
        at = taken = 0
        for span in self.spans:
            parts.append(b"0.0," * (span.offset - at))
            if span.length:
                parts.append(orjson.dumps(self.logprobs[taken : taken + span.length])[1:-1] + b",")
            taken += span.length
            at = span.offset + span.length
        parts.append(b"0.0," * (len(self.completion_ids) - at))
        return b"".join(parts)[:-1]

    def labels_text(self) -> bytes:
        """The inside of a JSON array over prompt and completion ids: the id where it was sampled, else -100."""
        parts: list[bytes] = [b"-100," * len(self.prompt_ids)]
        ids = self.completion_ids.tolist()
        at = 0
        for span in self.spans:
            parts.append(b"-100," * (span.offset - at))
            end = span.offset + span.length
            parts += [b"%d," % token_id for token_id in ids[span.offset : end]]
            at = end
        parts.append(b"-100," * (len(ids) - at))
        return b"".join(parts)[:-1]

    def digest(self) -> str:
        """`sha256:<hex>` over prompt ids, completion ids, mask and logprobs, each as a compact JSON array."""
        digest = hashlib.sha256()
        for part in (self.prompt_ids.text, self.completion_ids.text, self.mask_text(b"1", b"0"), self.logprobs_text()):
            digest.update(b"[" + part + b"]")
        return "sha256:" + digest.hexdigest()


_BITS = bytes(1 if value == ord("1") else 0 for value in range(256))


@dataclass(slots=True)
class _Node:
    turn: Turn
    parent: int | None
    choice: int
    children: list[int] = field(default_factory=list)


def merge(turns: Iterable[Turn], placements: Mapping[int, Placement]) -> list[TokenSequence]:
    """One sequence per leaf of the tree of calls: those that are trained on first, then in the order the leaves began.

    `placements` has the result of `Threads.place` per call number. Of a call's choices the one that a later call
    continues is followed; of a leaf's, the first, as BenchFlow does. A choice that no call continued is left out: no
    reward is about it.
    """
    nodes: dict[int, _Node] = {}
    for turn in turns:
        placement = placements[turn.call]
        nodes[turn.call] = _Node(turn, placement.parent, placement.choice or 0)
        if placement.parent is not None:
            nodes[placement.parent].children.append(turn.call)
    _prune(nodes)
    leaves = [call for call, node in nodes.items() if not node.children]
    leaves.sort(key=lambda call: (nodes[call].turn.kind not in TRAINABLE_KINDS, call))
    trained: set[tuple[int, int]] = set()
    return [_sequence(number, _path(call, nodes), trained) for number, call in enumerate(leaves)]


def _prune(nodes: dict[int, _Node]) -> None:
    """Takes away the leaves that were sampled again: an empty reply beside calls that sampled something, and a reply to
    a prompt whose other reply was continued. No reward is about what the agent threw away.
    """
    for call in sorted(nodes, reverse=True):
        node = nodes[call]
        if node.children:
            continue
        around = nodes if node.parent is None else nodes[node.parent].children
        siblings = [nodes[other] for other in around if other != call]
        if _was_sampled_again(node, siblings):
            del nodes[call]
            if node.parent is not None:
                nodes[node.parent].children.remove(call)


def _was_sampled_again(leaf: _Node, siblings: Sequence[_Node]) -> bool:
    if not any(choice.token_ids for choice in leaf.turn.choices):
        return bool(siblings)
    return any(
        sibling.children and sibling.parent == leaf.parent and sibling.turn.prompt == leaf.turn.prompt
        for sibling in siblings
    )


def _path(leaf: int, nodes: Mapping[int, _Node]) -> list[tuple[Turn, int]]:
    """The turns from a thread's root to `leaf`, each with the choice that the next one continues (the leaf: 0)."""
    path: list[tuple[Turn, int]] = []
    call: int | None = leaf
    choice = 0
    while call is not None:
        node = nodes[call]
        path.append((node.turn, choice))
        call, choice = node.parent, node.choice
    return path[::-1]


def _sequence(thread: int, path: Sequence[tuple[Turn, int]], trained: set[tuple[int, int]]) -> TokenSequence:
    root = path[0][0]
    parts: list[Ids] = []
    spans: list[Span] = []
    logprobs: list[float] = []
    by_version: list[VersionSpan] = []
    at = 0
    prompt_bytes = len(root.prompt.text)  # bytes of prompt text that the sequence holds already
    for turn, position in path:
        tail = (
            Ids(turn.prompt.text[prompt_bytes + 1 :] if prompt_bytes else turn.prompt.text)
            if turn is not root
            else Ids(b"")
        )
        choice = turn.choices[position]
        assert choice.token_ids is not None and choice.logprobs is not None
        at += len(tail)
        if (turn.call, position) not in trained:
            trained.add((turn.call, position))
            spans.append(Span(turn.call, turn.line, at, len(choice.token_ids)))
            logprobs += choice.logprobs
            ranges = turn.version_ranges[position] if position < len(turn.version_ranges) else ()
            by_version += version_spans(at, len(choice.token_ids), ranges, turn.policy_versions)
        at += len(choice.token_ids)
        parts += [tail, choice.token_ids]
        # The next prompt begins with this prompt and this choice.
        prompt_bytes = (
            len(turn.prompt.text) + len(choice.token_ids.text) + bool(turn.prompt.text and choice.token_ids.text)
        )
    versions = dict.fromkeys(version for turn, _ in path for version in turn.policy_versions)
    leaf = path[-1][0]
    return TokenSequence(
        thread=thread,
        kind=leaf.kind,
        calls=tuple(turn.call for turn, _ in path),
        lines=tuple(turn.line for turn, _ in path),
        prompt_ids=root.prompt,
        completion_ids=Ids(b",".join(part.text for part in parts if part.text)),
        spans=tuple(spans),
        logprobs=tuple(map(float, logprobs)),
        policy_versions=tuple(versions),
        version_spans=tuple(by_version) if versions else (),
    )
