"""Which calls of a rollout continue which, judged by their messages; for rows that a trainer renders again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from capture.chat.messages import MEANING, canonical_hash
from capture.journal.call import Call
from capture.sequences.sequences import TRAINABLE_KINDS
from train.rollouts.chat import answer_of, chat_of, choices_of
from train.rollouts.messages import Message, NotChat, plain
from train.rollouts.rollouts import Rollout
from train.rows.skip_reasons import Tally


def usable_calls(rollout: Rollout, tally: Tally) -> Iterator[Call]:
    """The agent's own calls that were answered completely; the others are counted."""
    for call in rollout.calls():
        tally.exchanges_seen += 1
        if call.outcome == "ended":
            tally.leave_out("ended")
        elif call.status_code != 200 or call.outcome == "error":
            tally.leave_out("provider_error")
        elif call.outcome != "ok":
            tally.leave_out("interrupted")
        elif call.purpose not in TRAINABLE_KINDS:
            tally.leave_out("helper_call")
        else:
            yield call


def last_line(rollout: Rollout) -> int | None:
    """The line of the agent's last call in the order the calls began; one with a reply, if there is any."""
    candidates = [
        (bool(choices_of(answer_of(call))), call.number, call.line) for call in usable_calls(rollout, Tally())
    ]
    return max(candidates)[2] if candidates else None


def branch_lines(rollout: Rollout, tally: Tally) -> set[int]:
    """Lines of the calls whose reply no later call continues: each ends a branch of the conversation.

    Messages decide, not tokens: these rows are rendered again, so a reply that came back in other tokens is still the
    same turn. What two branches share is trained in both, and `tally` notes it.
    """
    keys = _ConversationKeys()
    continued: set[int] = set()
    answered_prompts: set[int] = set()  # prompts that a later one continues with a reply, whatever it says
    # number, line, replies in the prompt, its key, the keys of its replies
    branch_ends: list[tuple[int, int, int, int, list[int]]] = []
    turns: set[int] = set()
    for call in usable_calls(rollout, Tally()):
        try:
            chat = chat_of(call)
            prompt = plain(chat.messages).messages
            after = keys.along(prompt)
            replies = [keys.then(after[-1], plain([choice.message]).messages[0]) for choice in chat.choices]
        except NotChat:
            # counted when it is converted
            branch_ends.append((call.number, call.line, 0, 0, [hash(("alone", call.line))]))
            continue
        continued.update(after)
        answers = [at for at, message in enumerate(prompt) if message["role"] == "assistant"]
        turns.update(after[at] for at in answers)
        answered_prompts.update(after[at - 1] for at in answers if at)
        turns.update(replies[:1])
        branch_ends.append((call.number, call.line, len(answers), after[-1], replies))
    leaves: dict[int, tuple[int, int]] = {}  # key of the first reply -> (line, turns)
    changed = 0
    for _, line, earlier, key, replies in sorted(branch_ends):
        if replies and replies[0] in leaves:
            tally.leave_out("repeated")
        elif replies and not any(reply in continued for reply in replies):
            leaves[replies[0]] = (line, earlier + 1)
            changed += key in answered_prompts
    twice = sum(number for _, number in leaves.values()) - len(turns)
    if len(leaves) > 1 and twice > 0:
        tally.note(
            "{n} reply(s) are in more than one branch and are trained in each: this trainer has no mask for them; "
            "trl-sft-ids trains each once",
            twice,
        )
    if changed:
        tally.note(
            "{n} reply(s) came back changed in the next prompt: the conversation is cut there, one row for each part",
            changed,
        )
    return {line for line, _ in leaves.values()}


class _ConversationKeys:
    """Numbers that stand for the beginnings of conversations; equal where the messages mean the same."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str, str, str], int] = {}

    def along(self, messages: Iterable[Message]) -> list[int]:
        """One key per message: the conversation up to and including it."""
        keys: list[int] = []
        for message in messages:
            keys.append(self.then(keys[-1] if keys else 0, message))
        return keys

    def then(self, key: int, message: Message) -> int:
        content = (message["role"], message["content"], repr(message.get("tool_calls")))
        found = self._hashes.get(content)
        if found is None:
            found = self._hashes[content] = canonical_hash(message, MEANING)
        return hash((key, found))


class ContinuedChoice:
    """Which choice of a call the agent continued with, as an index; 0 where it continued with none."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._keys = _ConversationKeys()
        self._continued: set[int] | None = None

    def __call__(self, call: Call) -> int:
        choices = choices_of(answer_of(call))
        if len(choices) < 2:
            return 0
        key = self._keys.along(plain(chat_of(call).messages).messages)[-1]
        for position, choice in enumerate(choices):
            if self._keys.then(key, plain([choice.message]).messages[0]) in self._prompts():
                return position
        return 0

    def _prompts(self) -> set[int]:
        if self._continued is None:
            self._continued = set()
            for call in usable_calls(self._rollout, Tally()):
                with suppress(NotChat):
                    self._continued.update(self._keys.along(plain(chat_of(call).messages).messages))
        return self._continued
