"""Making one call's bridge: requests to the engine's tokenizer, together where possible, and checks of the result.

What a template was seen to do is kept (`TemplateFacts`), so that most calls need one rendering, as a plain call does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.engines.base import Engine
from capture.engines.request import FollowUp
from capture.record import Ids
from capture.token_in.bridge import (
    PROBES,
    Bridge,
    TurnEnd,
    answered_as_before,
    beginning,
    bridge,
    closing_of,
    reads_alike,
    with_other_text,
)
from capture.token_in.parent import Conversation, Parent
from proxy.upstream.replicas import Replica

#: After the first, one bridge in this many is checked in full, and uses nothing that was learned before.
AUDIT_EVERY = 16
#: Seconds that the engine's tokenizer may take for one round of requests.
PATIENCE = 5.0


class NoBridge(Exception):
    """No bridge can be made, for the reason `code`. After a `surprise` no other bridge can be trusted."""

    def __init__(self, code: str, *, surprise: bool = False) -> None:
        super().__init__(code)
        self.code = code
        self.surprise = surprise


@dataclass(slots=True)
class TemplateFacts:
    """What is known of how an engine renders under the same options.

    `trusted`: /tokenize gave the ids of the chat route. `read`: a whole bridged prompt was decoded and compared.
    `rewrites`: the last reply is rendered in another way while nothing follows. `closing`: the ids after a reply that
    was cut. `ends`: how replies end, by their stop token and the role of the message that follows.
    """

    trusted: bool = False
    read: bool = False
    rewrites: bool = False
    closing: Ids | None = None
    ends: dict[tuple[int | None, str], TurnEnd] = field(default_factory=dict)


class BridgeBuilder:
    """`rendered` is the prompt that the engine's template makes of the request, once it is known."""

    def __init__(
        self,
        found: Parent,
        now: Conversation,
        template: TemplateFacts,
        replica: Replica,
        engine: Engine,
        body: dict[str, Any],
        audit_every: int = AUDIT_EVERY,
    ) -> None:
        self.found = found
        self.now = now
        self.template = template
        self.replica = replica
        self.engine = engine
        self.body = body
        self.audit_every = audit_every
        self.messages: list[Any] = body["messages"]
        self.turn = (found.reply.stop, now.roles[now.replies])
        self.rendered: Ids | None = None

    async def bridge(self) -> Bridge:
        """The prompt to send. Raises `NoBridge`, `UpstreamError`, `TimeoutError`."""
        audit = random.randrange(self.audit_every) == 0  # noqa: S311 (a sample, no secret)
        end = self.template.ends.get(self.turn)
        if self.template.trusted and end is not None and not audit and not _thinks(self.messages[self.now.replies - 1]):
            [rendered] = await self._render([self._question(self.messages)])
            self.rendered = rendered
            answered = answered_as_before(rendered, self.found, end)
            made = "" if answered is None else bridge(rendered, answered, self.found)
            sure = isinstance(made, Bridge) and (self.template.read or made.prompt == rendered)
            if sure and isinstance(made, Bridge) and await self._reads_alike(made):
                return made
        return await self._thoroughly(audit)

    async def _thoroughly(self, audit: bool) -> Bridge:
        """With A requested, and /tokenize checked against the ids of the call before, unless it was already."""
        template, before = self.template, self.found.past.conversation.exact
        same = before == self.now.exact[: len(before)]
        prove = same and not template.trusted
        rendered, answered, proof = await self._renderings(len(before) if prove else None)
        self.rendered = rendered
        if prove and proof != self.found.past.rendered:
            raise NoBridge("rendering_differs", surprise=True)
        if not same and not template.trusted:
            raise NoBridge("unproved")  # this call goes plainly, and is the proof
        template.trusted = True
        made = bridge(rendered, answered, self.found, template.closing)
        if isinstance(made, str):
            raise NoBridge(made)
        if not await self._reads_alike(made):
            raise NoBridge("reads_otherwise")
        if made.prompt != rendered and (audit or not template.read):
            ours, theirs = await self._read(made.prompt, rendered)
            if not reads_alike(ours, theirs, begun=False):
                raise NoBridge("prompt_reads_otherwise", surprise=True)
            template.read = True
        if made.end is not None:
            template.ends[self.turn] = made.end
        return made

    async def _renderings(self, proof: int | None) -> tuple[Ids, Ids, Ids | None]:
        """R, A (see `capture.bridge`), and the first `proof` messages as a prompt where that is asked for."""
        template, replies, cut = self.template, self.now.replies, self.found.reply.stop is None
        other = with_other_text(self.messages, replies) if template.rewrites else None
        questions = [
            self._question(self.messages),
            self._question(other) if other else self._question(self.messages[:replies], to_be_answered=False),
        ]
        if proof is not None:
            questions.append(self._question(self.messages[:proof]))
        closing = cut and template.closing is None
        if closing:
            questions += [self._question(probe, to_be_answered=False) for probe in PROBES]
        rendered, answered, *more = await self._render(questions)
        if closing:
            template.closing = closing_of(*more[-2:])
        if other is None and not cut and not rendered.startswith(answered):
            other = with_other_text(self.messages, replies)
            if other is not None:
                template.rewrites = True
                [answered] = await self._render([self._question(other)])
        if other is not None:
            answered = beginning(rendered, answered)
        return rendered, answered, more[0] if proof is not None else None

    async def _reads_alike(self, made: Bridge) -> bool:
        """Whether what was sampled reads like what the template wrote of the message that came back."""
        if made.ours == made.theirs:
            return True
        ours, theirs = await self._read(made.ours, made.theirs)
        return reads_alike(ours, theirs, begun=not made.whole)

    def _question(self, messages: Sequence[Any], *, to_be_answered: bool = True) -> FollowUp:
        return self.engine.render(self.body, list(messages), to_be_answered=to_be_answered)

    async def _render(self, questions: Sequence[FollowUp]) -> list[Ids]:
        answers = [self.engine.parse_rendered(answer) for answer in await self._ask(questions)]
        renderings = [ids for ids in answers if ids is not None]
        if len(renderings) < len(questions):
            raise NoBridge("no_rendering")
        return renderings

    async def _read(self, *ids: Ids) -> list[str]:
        answers = await self._ask([self.engine.detokenize(sequence) for sequence in ids])
        texts = [text for answer in answers if (text := self.engine.parse_detokenized(answer)) is not None]
        if len(texts) < len(ids):
            raise NoBridge("no_rendering")
        return texts

    async def _ask(self, questions: Sequence[FollowUp]) -> list[Any]:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.gather(
                *(self.replica.get_json(path, method="POST", body=body) for path, body in questions)
            )


def _thinks(message: dict[str, Any]) -> bool:
    """Whether the message holds reasoning, which templates leave out here and there: then A is asked for."""
    if any(message.get(name) for name in ("reasoning", "reasoning_content", "thinking")):
        return True
    content = message.get("content")
    return "think>" in (content if isinstance(content, str) else str(content))
