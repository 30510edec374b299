"""What is kept of a call once its line has been read; its messages are read again only where something broke."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from capture.engines.meaning import LogprobMeaning
from capture.errors import RecordError
from capture.journal.call import Call, TokenIn
from capture.record import TokenCapture
from capture.sequences.sequences import SIDE_KINDS, Turn
from capture.sequences.versions import VersionRange, read_ranges
from capture.token_ids import Ids
from train.tokens.sampling import meaning_of, not_plain, sampling_of

#: How vLLM 0.11 to 0.32, SGLang 0.5, llama.cpp, LiteLLM and hosted APIs say that a prompt does not fit the context.
_NO_ROOM: Final = re.compile(
    r"context[ _](?:length|size|window)|maximum (?:model|allowed|input) length|max_model_len|longer than the model"
    r"|prompt is too long|too many (?:input )?tokens|token count exceeds|input is too long",
    re.IGNORECASE,
)


@dataclass(slots=True)
class CallSummary:
    """One call: `number` is its place in the order the calls began, `line` its 0-based line in the journal.

    `offset` is where the line begins, in bytes. `status` is the HTTP status that the agent got, 0 where there was none.
    """

    number: int
    line: int
    offset: int
    purpose: str
    outcome: str
    status: int
    capture: TokenCapture | None
    #: Why the capture cannot be read, where there is one that cannot.
    unreadable: str | None
    #: What the engine said when it refused the call before anything was sampled.
    refusal: str | None
    #: The limit of the session's budget that ended it, with its value: the proxy answered, nothing was sampled.
    ended: str | None
    sampling: dict[str, Any]
    not_plain: list[str]
    logprobs: LogprobMeaning
    #: The versions of the weights while the call ran: one, or more where they were updated meanwhile.
    policy_versions: tuple[str, ...]
    retry_of: int | None
    kind: str = "agent"
    token_in: TokenIn | None = None
    #: Per choice, which version sampled which of its ids, where the engine said so.
    version_ranges: tuple[tuple[VersionRange, ...], ...] = ()

    @classmethod
    def of(cls, call: Call) -> CallSummary:
        capture, unreadable = None, None
        try:
            capture = call.capture
        except RecordError as error:
            unreadable = str(error)
        retry_of = call.metadata.get("retry_of")
        ranges = _version_ranges(call, capture)
        return cls(
            number=call.number,
            line=call.line,
            offset=call.offset,
            purpose=call.purpose,
            outcome=call.outcome,
            status=call.status_code,
            capture=capture,
            unreadable=unreadable,
            refusal=_refusal(call, capture),
            ended=_ended(call),
            sampling=sampling_of(call),
            not_plain=not_plain(call),
            logprobs=meaning_of(call),
            policy_versions=_policy_versions(call, ranges),
            retry_of=retry_of if isinstance(retry_of, int) else None,
            token_in=_token_in(call),
            version_ranges=ranges,
        )

    @property
    def complete(self) -> bool:
        """Its prompt ids, sampled ids and logprobs are all there."""
        return self.capture is not None and self.capture.complete

    @property
    def answered(self) -> bool:
        return self.outcome == "ok" and self.status == 200

    @property
    def own_work(self) -> bool:
        """Whether it is the agent's own work: side calls (titles, summaries) do not decide over a rollout."""
        return self.kind not in SIDE_KINDS

    @property
    def turn(self) -> Turn | None:
        """The call as a turn of a token sequence; None where it is not complete, or has several prompts."""
        if not self.complete or self.capture is None or self.capture.prompt_token_ids is None:
            return None
        return Turn(
            call=self.number,
            line=self.line,
            prompt=self.capture.prompt_token_ids,
            choices=self.capture.completions,
            kind=self.kind,
            policy_versions=self.policy_versions,
            version_ranges=self.version_ranges,
        )


def _refusal(call: Call, capture: TokenCapture | None) -> str | None:
    """The engine's message where it refused the call: nothing was sampled, so nothing of the policy is missing.

    That is certain for a call that was never sent, for HTTP 400 to 499 but 408, and for a prompt that does not fit,
    whatever the status: some servers answer that with 500, or with 200 and an error in the stream.
    """
    body = call.response_body
    if capture is not None and any(why.code == "never_sent" for why in capture.unavailable.values()):
        return "no answer: the agent left before the call was sent"
    sampled = capture is not None and any(choice.token_ids for choice in capture.completions)
    if sampled or body.get("choices") or body.get("content") or body.get("output"):
        return None
    error = body.get("error", body)
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else ""
    status = call.status_code
    if (400 <= status < 500 and status != 408) or (call.outcome == "error" and _NO_ROOM.search(text)):
        return f"HTTP {status}" + (f": {' '.join(text.split())[:200]}" if text else "")
    return None


def _version_ranges(call: Call, capture: TokenCapture | None) -> tuple[tuple[VersionRange, ...], ...]:
    """Empty where the engine did not say it for all choices."""
    reported = call.metadata.get("weight_versions")
    if capture is None or not isinstance(reported, list) or len(reported) != len(capture.completions):
        return ()
    pairs = zip(reported, capture.completions, strict=True)
    ranges = tuple(read_ranges(rows, len(choice.token_ids or ())) for rows, choice in pairs)
    return ranges if all(ranges) else ()


def _ended(call: Call) -> str | None:
    if call.outcome != "ended":
        return None
    ended = call.metadata.get("ended")
    return f"{ended.get('limit')} {ended.get('max')}" if isinstance(ended, dict) else "unknown"


def _policy_versions(call: Call, ranges: tuple[tuple[VersionRange, ...], ...]) -> tuple[str, ...]:
    """What sampled is the engine's to say; what the proxy was told is when."""
    if ranges:
        return tuple(dict.fromkeys(each.version for choice in ranges for each in choice))
    versions = (call.metadata.get("policy_version"), call.metadata.get("policy_version_end"))
    return tuple(dict.fromkeys(str(version) for version in versions if version is not None))


def _token_in(call: Call) -> TokenIn | None:
    """The call's token-in without the ids of the other prompt, which are read again where they are needed."""
    token_in = call.token_in
    return token_in if token_in is None or token_in.rendered is None else replace(token_in, rendered=Ids(b""))
