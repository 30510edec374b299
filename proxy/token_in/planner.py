"""Token-in for one session: which earlier call a chat call continues, and the prompt ids that extend that call.

The rules are in `capture.token_in`, the requests to the engine's tokenizer in `render`, the calls that can be continued
in `call_history`. In mode `auto` a failure costs the bridge and never the call; in mode `require` a call that cannot be
bridged is refused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from capture.chat.tool_calls import with_call_ids
from capture.engines.base import Engine
from capture.engines.reader import Reader
from capture.engines.wires import CHAT
from capture.record import Ids, TokenCapture
from capture.sequences.versions import version_in_name
from capture.token_in.bridge import NOTHING_TO_BRIDGE, REASONS
from capture.token_in.parent import Conversation, Parent, parent
from proxy.errors import NotBridged, UpstreamError
from proxy.token_in.call_history import CallHistory, past_call
from proxy.token_in.render import AUDIT_EVERY, BridgeBuilder, NoBridge, TemplateFacts
from proxy.upstream.replicas import Replica

log = logging.getLogger("proxy")

#: How often in a row the engine's tokenizer may fail before it is left alone.
FAILURES = 3
#: What was learned is kept for this many sets of tools and options a session; an agent may change them at every call.
TEMPLATES = 256


@dataclass(slots=True)
class PromptPlan:
    """What token-in does with one call: the `prompt` to send, or the `reason` why there is none."""

    conversation: Conversation | None = None
    continues: int | None = None
    prompt: Ids | None = None
    rendered: Ids | None = None
    template: TemplateFacts | None = None
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
    """One session's calls that can be continued, and what its engine was found to do."""

    session: str
    mode: str
    #: Whether the session's journal had calls before it: replies may be theirs.
    opened_again: bool = False
    off: str | None = None
    bridged: int = 0
    not_bridged: Counter[str] = field(default_factory=Counter)
    history: CallHistory = field(default_factory=CallHistory)
    #: One bridge in this many is checked in full.
    audit_every: int = AUDIT_EVERY
    #: The first name of the policy, by each that the engine has served a later version of it under.
    _policy_names: dict[str, str] = field(default_factory=dict)
    _templates: dict[tuple[str, int], TemplateFacts] = field(default_factory=dict)
    _failures: int = 0

    async def plan(self, replica: Replica, engine: Engine, wire: str, body: dict[str, Any]) -> PromptPlan:
        """The plan for a call with this body (as it goes upstream). Never raises; see `require`."""
        plan = PromptPlan()
        try:
            plan.reason = await self._plan(plan, replica, engine, wire, body)
        except (UpstreamError, TimeoutError):
            plan.drop("no_rendering")
        except Exception as error:
            log.exception("session %s: token-in failed", self.session)
            plan.drop("failed", f"{type(error).__name__}: {error}")
        self._failures = self._failures + 1 if plan.reason == "no_rendering" else 0
        if self._failures >= FAILURES:
            self._turn_off("no_rendering", f"{FAILURES} times in a row")
        return plan

    def require(self, plan: PromptPlan) -> None:
        """Raises `NotBridged` where a bridge is required and there is none."""
        if self.mode == "require" and plan.prompt is None and plan.reason not in NOTHING_TO_BRIDGE:
            raise NotBridged(
                f"token-in is required, and this call cannot be bridged: {plan.sentence()} [{plan.reason}]; "
                "with --token-in auto it would be sent as it is"
            )

    async def _plan(
        self, plan: PromptPlan, replica: Replica, engine: Engine, wire: str, body: dict[str, Any]
    ) -> str | None:
        """The code of a reason for no bridge, or None with the plan filled in."""
        if wire != CHAT:
            return "not_chat"
        if not engine.takes_prompt_ids:
            if not self.not_bridged["engine_cannot"]:
                log.warning("session %s: no token-in: %s", self.session, REASONS["engine_cannot"])
            return "engine_cannot"
        plan.conversation = now = Conversation.of(self._by_policy(body))
        if now is None or not _writable(body):
            plan.conversation = None
            return "unreadable"
        if self.off is not None:
            plan.detail = self.off
            return "turned_off" if now.replies else "begins"
        found = parent(now, self.history, self.history.known)
        if isinstance(found, str):
            return "opened_again" if found == "begins" and now.replies and self.opened_again else found
        self.history.used(found.past)
        plan.continues = found.past.call
        if engine.has_prompt_ids(body):
            return "own_prompt_ids"
        if _has_media(body["messages"]):
            return "media"
        return await self._bridge(plan, found, replica, engine, body)

    async def _bridge(
        self, plan: PromptPlan, found: Parent, replica: Replica, engine: Engine, body: dict[str, Any]
    ) -> str | None:
        assert plan.conversation is not None
        plan.template = self._template(replica.label, plan.conversation.options)
        builder = BridgeBuilder(found, plan.conversation, plan.template, replica, engine, body, self.audit_every)
        try:
            made = await builder.bridge()
        except NoBridge as no:
            if no.surprise:
                self._turn_off(no.code)
            return no.code
        finally:
            plan.rendered = builder.rendered
        plan.prompt, plan.closing = made.prompt, made.closing
        return None

    def _by_policy(self, body: dict[str, Any]) -> dict[str, Any]:
        """`body` with one name for all versions of a policy: a conversation goes on when the version changes."""
        model = body.get("model")
        name = self._policy_name(model) if isinstance(model, str) else model
        return body if name == model else body | {"model": name}

    def _policy_name(self, model: str) -> str:
        return self._policy_names.get(model) or model.removesuffix(version_in_name(model) or "")

    def rename_policy(self, before: str | None, after: str) -> None:
        """The engine serves the policy under another name now; None where agents chose the name themselves."""
        self._policy_names[after] = self._policy_name(before or after)

    def _template(self, label: str, options: int) -> TemplateFacts:
        found = self._templates.get((label, options))
        if found is None:
            found = self._templates[label, options] = TemplateFacts()
            if len(self._templates) > TEMPLATES:
                del self._templates[next(iter(self._templates))]
        return found

    def _turn_off(self, reason: str, detail: str = "") -> None:
        if self.off is None:
            self.off = REASONS[reason] + (f", {detail}" if detail else "")
            log.warning("session %s: token-in is off from now on: %s", self.session, self.off)
        self.history.clear()

    # when the call is over

    def record_call(
        self,
        plan: PromptPlan,
        call: int,
        engine: Engine | None,
        body: dict[str, Any],
        outcome: str,
        capture: TokenCapture | None,
        reader: Reader | None,
        call_ids: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Remembers an answered call for those that continue it. Returns what the call's record says of token-in.

        `call_ids` are the ids of the answer's tool calls where the agent got others than the engine gave.
        """
        used = None if capture is None else capture.prompt_token_ids
        if plan.prompt is not None and outcome != "error" and used != plan.prompt:
            plan.drop("prompt_not_told" if used is None else "prompt_not_used")
            if used is not None:
                self._turn_off("prompt_not_used")
        elif plan.prompt is None and outcome == "ok" and used is not None and plan.rendered is not None:
            if plan.template is not None and used == plan.rendered:
                plan.template.trusted = True
            elif plan.template is not None:
                self._turn_off("rendering_differs")
        if self.off is None and engine and plan.conversation is not None and outcome == "ok" and reader is not None:
            try:
                rendered = plan.rendered if plan.prompt is not None else None
                answer = with_call_ids(reader.assembled(), call_ids)
                self.history.add(past_call(call, plan.conversation, rendered, engine, body, capture, answer))
            except Exception as error:
                log.exception("session %s: token-in cannot keep call %d (%s)", self.session, call, error)
        return self._record(plan)

    def _record(self, plan: PromptPlan) -> dict[str, Any]:
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
