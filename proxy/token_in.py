"""Token-in for one session: which held call a chat call goes on from, and the prompt ids that make it extend that call.

The rules are in `capture.continues` and `capture.bridge`. Here are the engine's tokenizer calls, those of a round
together, the checks before ids are sent, and what is kept of the calls that may be continued. In mode `auto` whatever
goes wrong costs the bridge and never the call; in mode `require` a call that cannot be bridged is refused.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from capture.bridge import (
    NOTHING_TO_BRIDGE,
    PROBES,
    REASONS,
    Bridge,
    beginning,
    bridge,
    closing_of,
    reads_alike,
    with_other_text,
)
from capture.continues import Conversation, Held, Parent, Reply, parent, turn
from capture.engines.base import CHAT, Engine, Question
from capture.engines.reader import Reader
from capture.record import Ids, TokenCapture
from proxy.errors import NotBridged, UpstreamError
from proxy.replicas import Replica

log = logging.getLogger("proxy")

#: Bytes of held calls a session; the oldest go first. A call of 100,000 prompt ids takes about 1.2 MB.
MEMORY = 32 << 20
#: Replies that are remembered by a number each when their calls are not held any more.
KNOWN = 100_000
#: One bridge in so many is checked as a whole, after the first.
AGAIN = 16
#: Seconds that the engine's tokenizer may take for one round of questions, and how often in a row it may fail.
PATIENCE = 5.0
FAILURES = 3


@dataclass(slots=True)
class Plan:
    """What token-in makes of one call: the `prompt` to send, or the `reason` why there is none."""

    conversation: Conversation | None = None
    continues: int | None = None
    prompt: Ids | None = None
    rendered: Ids | None = None
    closing: int = 0
    reason: str | None = None
    detail: str | None = None

    def drop(self, reason: str, detail: str | None = None) -> None:
        """The call goes as the agent sent it, for `reason`."""
        self.prompt, self.reason, self.detail = None, reason, detail

    def sentence(self) -> str:
        return REASONS[self.reason or "failed"] + (f" ({self.detail})" if self.detail else "")


@dataclass(slots=True)
class TokenIn:
    """One session's held calls and what its engine was found to do."""

    session: str
    mode: str
    off: str | None = None
    bridged: int = 0
    not_bridged: Counter[str] = field(default_factory=Counter)
    _held: OrderedDict[int, Held] = field(default_factory=OrderedDict)
    _size: int = 0
    _known: dict[int, None] = field(default_factory=dict)
    _trusted: set[tuple[str, int]] = field(default_factory=set)
    _read: set[tuple[str, int]] = field(default_factory=set)
    _rewrites: set[tuple[str, int]] = field(default_factory=set)
    _closings: dict[tuple[str, int], Ids] = field(default_factory=dict)
    _failures: int = 0

    async def plan(self, replica: Replica, engine: Engine, wire: str, body: dict[str, Any]) -> Plan:
        """The plan for a call with this body (as it goes upstream). Never raises; see `require`."""
        plan = Plan()
        try:
            plan.reason = await self._plan(plan, replica, engine, wire, body)
        except (UpstreamError, TimeoutError):
            self._failures += 1
            plan.drop("no_rendering")
            if self._failures >= FAILURES:
                self._turn_off("no_rendering", f"{FAILURES} times in a row")
        except Exception as error:
            log.exception("session %s: token-in failed", self.session)
            plan.drop("failed", f"{type(error).__name__}: {error}")
        return plan

    def require(self, plan: Plan) -> None:
        """Raises `NotBridged` where a bridge is required and there is none."""
        if self.mode == "require" and plan.prompt is None and plan.reason not in NOTHING_TO_BRIDGE:
            raise NotBridged(
                f"token-in is required, and this call cannot be bridged: {plan.sentence()} [{plan.reason}]; "
                "with --token-in auto it would be sent as it is"
            )

    async def _plan(self, plan: Plan, replica: Replica, engine: Engine, wire: str, body: dict[str, Any]) -> str | None:
        """The code of a reason for no bridge, or None with the plan filled in."""
        if wire != CHAT:
            return "not_chat"
        if not engine.takes_prompt_ids:
            return "engine_cannot"
        plan.conversation = now = Conversation.of(body)
        if now is None or not _writable(body):
            plan.conversation = None
            return "unreadable"
        if self.off is not None:
            plan.detail = self.off
            return "turned_off" if now.replies else "begins"
        found = parent(now, self._held.values(), self._known)
        if isinstance(found, str):
            return found
        plan.continues = found.held.call
        if engine.brings_prompt(body):
            return "own_prompt_ids"
        if _has_media(body["messages"]):
            return "media"
        return await self._bridge(plan, found, replica, engine, body)

    async def _bridge(
        self, plan: Plan, found: Parent, replica: Replica, engine: Engine, body: dict[str, Any]
    ) -> str | None:
        now, messages, before = plan.conversation, body["messages"], found.held.conversation
        assert now is not None
        key = (replica.label, now.options)
        first, cut = key not in self._trusted, found.reply.stop is None
        questions = [
            engine.render(body, messages, to_be_answered=True),
            engine.render(body, messages[: now.replies], to_be_answered=False),
        ]
        if first:
            if before.exact != now.exact[: len(before.exact)]:
                return "unproved"
            questions.append(engine.render(body, messages[: len(before.turns)], to_be_answered=True))
        if cut and key not in self._closings:
            questions += [engine.render(body, probe, to_be_answered=False) for probe in PROBES]
        other = with_other_text(messages, now.replies) if key in self._rewrites else None
        if other is not None:
            questions[1] = engine.render(body, other, to_be_answered=True)
        rendered, answered, *more = [engine.rendered(one) for one in await self._ask(replica, questions)]
        if rendered is None or answered is None or None in more:
            return "no_rendering"
        self._failures = 0
        if other is not None:
            answered = beginning(rendered, answered)
        elif not rendered.startswith(answered) and not cut:
            other = with_other_text(messages, now.replies)
            if other is not None:
                self._rewrites.add(key)
                [answer] = await self._ask(replica, [engine.render(body, other, to_be_answered=True)])
                if (changed := engine.rendered(answer)) is None:
                    return "no_rendering"
                answered = beginning(rendered, changed)
        if first and more.pop(0) != found.held.rendered:
            self._turn_off("rendering_differs")
            return "rendering_differs"
        if len(more) == 2:
            self._closings[key] = closing_of(*(one for one in more if one is not None))
        made = bridge(rendered, answered, found, self._closings.get(key))
        if isinstance(made, str):
            return made
        self._trusted.add(key)
        if (reason := await self._check(made, rendered, key, replica, engine)) is not None:
            return reason
        plan.prompt, plan.rendered, plan.closing = made.prompt, rendered, made.closing
        return None

    async def _check(
        self, made: Bridge, rendered: Ids, key: tuple[str, int], replica: Replica, engine: Engine
    ) -> str | None:
        """Reads what was sampled beside what the template wrote for it; at first, and now and then, all of both."""
        pairs = [] if made.ours == made.theirs else [(made.ours, made.theirs)]
        first = key not in self._read
        whole = made.prompt != rendered and (first or random.randrange(AGAIN) == 0)  # noqa: S311 (a sample, no secret)
        if whole:
            pairs.append((made.prompt, rendered))
        if not pairs:
            return None
        answers = await self._ask(replica, [engine.read(ids) for pair in pairs for ids in pair])
        texts = [engine.said(answer) for answer in answers]
        if None in texts:
            return "no_rendering"
        alike = [reads_alike(a or "", b or "") for a, b in zip(texts[::2], texts[1::2], strict=True)]
        if made.ours != made.theirs and not alike[0]:
            return "reads_otherwise"
        if whole and not alike[-1]:
            self._turn_off("prompt_reads_otherwise")
            return "prompt_reads_otherwise"
        if whole:
            self._read.add(key)
        return None

    async def _ask(self, replica: Replica, questions: Sequence[Question]) -> list[Any]:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(*(replica.get_json(path, method="POST", body=body) for path, body in questions))

    def _turn_off(self, reason: str, detail: str = "") -> None:
        if self.off is None:
            self.off = REASONS[reason] + (f", {detail}" if detail else "")
            log.warning("session %s: token-in is off from now on: %s", self.session, self.off)
        self._held.clear()
        self._known.clear()
        self._size = 0

    # when the call is over

    def over(
        self,
        plan: Plan,
        call: int,
        engine: Engine | None,
        body: dict[str, Any],
        outcome: str,
        capture: TokenCapture | None,
        reader: Reader | None,
    ) -> dict[str, Any]:
        """Holds an answered call for those that go on from it; what the call's record says of token-in."""
        told = None if capture is None else capture.prompt_token_ids
        if plan.prompt is not None and outcome != "error" and told != plan.prompt:
            plan.drop("prompt_not_told" if told is None else "prompt_not_used")
            if told is not None:
                self._turn_off("prompt_not_used")
        if self.off is None and engine and plan.conversation is not None and outcome == "ok" and reader is not None:
            try:
                self._hold(plan, call, engine, body, capture, reader)
            except Exception as error:
                log.exception("session %s: token-in cannot hold call %d (%s)", self.session, call, error)
        return self._record(plan)

    def _hold(
        self,
        plan: Plan,
        call: int,
        engine: Engine,
        body: dict[str, Any],
        capture: TokenCapture | None,
        reader: Reader,
    ) -> None:
        assert plan.conversation is not None
        choices = reader.assembled().get("choices")
        replies = tuple(_reply(engine, body, choice, capture) for choice in choices or () if isinstance(choice, dict))
        prompt = None if capture is None else capture.prompt_token_ids
        missing = capture is None or prompt is None or "prompt_token_ids" in capture.unavailable
        held = Held(
            call,
            plan.conversation,
            prompt or Ids(b""),
            (plan.rendered if plan.prompt is not None and plan.rendered is not None else prompt) or Ids(b""),
            replies,
            "parent_incomplete" if missing else None,
        )
        self._held[call] = held
        self._size += held.size
        while self._size > MEMORY and self._held:
            _, gone = self._held.popitem(last=False)
            self._size -= gone.size
            self._known |= dict.fromkeys(reply.turn for reply in gone.replies)
        for key in list(self._known)[: max(0, len(self._known) - KNOWN)]:
            del self._known[key]

    def _record(self, plan: Plan) -> dict[str, Any]:
        bridged = plan.prompt is not None
        if not bridged and plan.reason is None:
            plan.reason = "not_sent"
        if bridged:
            self.bridged += 1
        else:
            self.not_bridged[plan.reason or ""] += 1
        row: dict[str, Any] = {"mode": self.mode, "bridged": bridged, "reason": plan.reason}
        if plan.reason is not None:
            row["detail"] = plan.sentence()
        if plan.continues is not None:
            row["continues"] = plan.continues
        if bridged:
            row["closing_ids"] = plan.closing
            if plan.rendered is not None and plan.rendered != plan.prompt:
                row["rendered_prompt_token_ids"] = plan.rendered.json()
        return row

    def state(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "bridged": self.bridged,
            "not_bridged": dict(self.not_bridged),
            "turned_off": self.off,
        }


def _reply(engine: Engine, body: dict[str, Any], choice: dict[str, Any], capture: TokenCapture | None) -> Reply:
    message = choice.get("message") or {}
    index = choice.get("index")
    one = next((one for one in (capture.completions if capture else ()) if one.index == index), None)
    sampled = None if one is None else one.token_ids
    if capture is None or not sampled or "completion_token_ids" in capture.unavailable:
        return Reply(turn(message), Ids(b""), unusable="parent_incomplete")
    ended = engine.ended(choice, body)
    if ended == "stop_token":
        return Reply(turn(message), sampled, stop=int(sampled.text.rpartition(b",")[2]))
    if ended != "cut":
        return Reply(turn(message), sampled, unusable="stop_string" if ended == "stop_string" else "parent_incomplete")
    if message.get("tool_calls"):
        return Reply(turn(message), sampled, unusable="cut_tool_call")
    return Reply(turn(message), sampled, unusable=None if message.get("content") else "cut_in_reasoning")


def _writable(body: dict[str, Any]) -> bool:
    """Whether the request's other fields are what orjson writes: ids go into no other."""
    try:
        orjson.dumps({name: value for name, value in body.items() if name not in ("messages", "tools")})
    except TypeError:
        return False
    return True


def _has_media(messages: Sequence[Any]) -> bool:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, str) and (not isinstance(part, dict) or part.get("type", "text") != "text"):
                return True
    return False
