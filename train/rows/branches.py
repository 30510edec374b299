"""Which calls of a rollout go on from which, told from their messages; for rows that a trainer renders again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from capture.journal.journal import Call
from capture.messages import MEANING, canonical_hash
from capture.sequences.sequences import TRAINABLE_KINDS
from train.rollouts.messages import Message, NotChat, answer_of, chat_of, plain, replies_of
from train.rollouts.rollouts import Rollout
from train.rows.skip_reasons import Tally


def usable(rollout: Rollout, tally: Tally) -> Iterator[Call]:
    """The agent's own calls that were answered to their end; the others are counted."""
    for call in rollout.calls():
        tally.exchanges_seen += 1
        if call.status_code != 200 or call.outcome == "error":
            tally.leave_out("provider_error")
        elif call.outcome != "ok":
            tally.leave_out("interrupted")
        elif call.purpose not in TRAINABLE_KINDS:
            tally.leave_out("helper_call")
        else:
            yield call


def last_line(rollout: Rollout) -> int | None:
    """The line of the agent's last call, by the order the calls began; one with a reply, where there is one."""
    found: tuple[bool, int, int] | None = None
    for call in usable(rollout, Tally()):
        this = (bool(replies_of(answer_of(call))), call.number, call.line)
        found = this if found is None else max(found, this)
    return None if found is None else found[2]


def branch_lines(rollout: Rollout, tally: Tally) -> set[int]:
    """Lines of the calls whose reply no later call takes up: each ends a branch of the conversation.

    Told from the messages, not the tokens: these rows are rendered again, so a reply that came back in other tokens is
    still the same turn. What two branches share is trained in both, and told.
    """
    keys = _Keys()
    taken_up: set[int] = set()
    asked_again: set[int] = set()  # prompts that a later one goes on from with a reply, whatever it says
    ends: list[tuple[int, int, int, int, list[int]]] = []  # number, line, replies in the prompt, its key, its replies'
    turns: set[int] = set()
    for call in usable(rollout, Tally()):
        try:
            chat = chat_of(call)
            prompt = plain(chat.messages).messages
            after = keys.along(prompt)
            replies = [keys.then(after[-1], plain([reply.message]).messages[0]) for reply in chat.replies]
        except NotChat:
            ends.append((call.number, call.line, 0, 0, [hash(("alone", call.line))]))  # told when it is converted
            continue
        taken_up.update(after)
        answers = [at for at, message in enumerate(prompt) if message["role"] == "assistant"]
        turns.update(after[at] for at in answers)
        asked_again.update(after[at - 1] for at in answers if at)
        turns.update(replies[:1])
        ends.append((call.number, call.line, len(answers), after[-1], replies))
    leaves: dict[int, tuple[int, int]] = {}  # key of the first reply -> (line, turns)
    changed = 0
    for _, line, earlier, key, replies in sorted(ends):
        if replies and replies[0] in leaves:
            tally.leave_out("repeated")
        elif replies and not any(reply in taken_up for reply in replies):
            leaves[replies[0]] = (line, earlier + 1)
            changed += key in asked_again
    twice = sum(number for _, number in leaves.values()) - len(turns)
    if len(leaves) > 1 and twice > 0:
        tally.note(
            "{n} reply(s) stand in more than one branch and are trained in each: this trainer has no mask for them; "
            "trl-sft-ids trains each once",
            twice,
        )
    if changed:
        tally.note(
            "{n} reply(s) did not come back in the next prompt as they were: the conversation is cut there, a row each",
            changed,
        )
    return {line for line, _ in leaves.values()}


class _Keys:
    """Numbers that stand for the beginnings of conversations; equal where the messages mean the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, str], int] = {}

    def along(self, messages: Iterable[Message]) -> list[int]:
        """One key a message: the conversation up to it."""
        keys: list[int] = []
        for message in messages:
            keys.append(self.then(keys[-1] if keys else 0, message))
        return keys

    def then(self, key: int, message: Message) -> int:
        told = (message["role"], message["content"], repr(message.get("tool_calls")))
        found = self._known.get(told)
        if found is None:
            found = self._known[told] = canonical_hash(message, MEANING)
        return hash((key, found))


class Followed:
    """Which choice of a call the agent went on with; the first where it took up none."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._keys = _Keys()
        self._taken_up: set[int] | None = None

    def __call__(self, call: Call) -> int:
        replies = replies_of(answer_of(call))
        if len(replies) < 2:
            return 0
        key = self._keys.along(plain(chat_of(call).messages).messages)[-1]
        for position, reply in enumerate(replies):
            if self._keys.then(key, plain([reply.message]).messages[0]) in self._prompts():
                return position
        return 0

    def _prompts(self) -> set[int]:
        if self._taken_up is None:
            self._taken_up = set()
            for call in usable(self._rollout, Tally()):
                with suppress(NotChat):
                    self._taken_up.update(self._keys.along(plain(chat_of(call).messages).messages))
        return self._taken_up
