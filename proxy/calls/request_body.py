"""An agent's request body: as received, parsed, and as sent on, with the session's model and sampling defaults."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import orjson

from capture import json
from capture.errors import JsonError
from proxy.errors import Refusal
from proxy.sampling import LIMITS, SAMPLING, OutputCap, cap_output, force
from proxy.settings import SessionOptions


@dataclass(frozen=True, slots=True)
class Request:
    """`raw` as it came; `body` parsed, an empty object where `raw` is none; `upstream` what is sent on.

    `strict` says that `raw` is one line of JSON as the journal writes it, so that it can be copied there as it is;
    `lenient` that it holds what only Python's JSON does (NaN, lone surrogates), which is sent on unchanged.
    """

    raw: bytes
    body: dict[str, Any]
    upstream: dict[str, Any]
    is_object: bool
    strict: bool
    lenient: bool
    #: Whether `raw` may be sent on where nothing was changed, or cannot be written.
    raw_goes: bool = True
    #: What was changed of the reply's length, if anything.
    cap: OutputCap | None = None

    @classmethod
    def of(cls, raw: bytes, options: SessionOptions) -> Request:
        parsed, strict = _parse(raw)
        if not isinstance(parsed, dict):
            # Not for us to judge: the engine gets it as it is, and its own error goes back.
            return cls(raw, {}, {}, False, False, False)
        upstream, cap = _with_options(parsed, options)
        one_line = strict and b"\n" not in raw and b"\r" not in raw
        return cls(raw, parsed, upstream, True, one_line, not strict, cap=cap)

    def sent_as(self, chat: dict[str, Any], options: SessionOptions) -> Request:
        """The same request, sent on as `chat` instead of as it came."""
        upstream, cap = _with_options(chat, options)
        return replace(self, upstream=upstream, raw_goes=False, cap=cap)

    def capped(self, most: int, by: str) -> Request:
        """The same request, whose choices sample `most` tokens at most; `by` is the option that says so."""
        upstream = dict(self.upstream)
        cap = cap_output(upstream, most, by)
        if cap is None:
            return self
        return replace(self, upstream=upstream, cap=replace(cap, asked=self.cap.asked) if self.cap else cap)

    def uncapped(self) -> Request:
        """The same request without a limit where the agent set none: where the prompt and that limit together do not
        fit the context, what is left of the context is less than the limit.
        """
        upstream = {name: value for name, value in self.upstream.items() if name not in LIMITS}
        return replace(self, upstream=upstream, cap=None)

    @property
    def limit_is_ours(self) -> bool:
        """Whether the agent set no limit, and gets one."""
        return self.cap is not None and self.cap.asked is None

    def to_model(self, model: str | None) -> Request:
        """The same request, to the model of this name where there is one."""
        if model is None or not self.is_object or self.upstream.get("model") == model:
            return self
        return replace(self, upstream=self.upstream | {"model": model})

    @property
    def streams(self) -> bool:
        return self.upstream.get("stream") is True

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were sent, the agent's and the session's."""
        return {name: value for name, value in self.upstream.items() if name in SAMPLING and value is not None}

    def dump(self, body: dict[str, Any]) -> bytes:
        """`body` as bytes for the engine; the agent's own bytes where nothing was changed."""
        if not self.is_object or (self.raw_goes and body == self.body and body is not self.body):
            return self.raw
        if not self.lenient:
            with suppress(TypeError):  # nested deeper than orjson writes, or integers beyond 64 bits
                return orjson.dumps(body)
        try:
            return json.dumps_as_read(body)
        except JsonError:
            if not self.raw_goes:
                raise Refusal(400, "the request is nested too deeply") from None
            return self.raw


def _with_options(body: dict[str, Any], options: SessionOptions) -> tuple[dict[str, Any], OutputCap | None]:
    """`body` with the session's model, its sampling where the agent set none or it is forced, and its length capped."""
    upstream = dict(body)
    if options.model is not None:
        upstream["model"] = options.model
    for name, value in options.sampling.items():
        if upstream.get(name) is None:
            upstream[name] = value
    if options.force_sampling:
        force(upstream, options.force_sampling)
    most = options.max_output_tokens
    return upstream, None if most is None else cap_output(upstream, most, "max_output_tokens")


def _parse(raw: bytes) -> tuple[Any, bool]:
    """A request's JSON value and whether it is strict JSON; None for what is no JSON."""
    try:
        return json.loads_strict(raw), True
    except JsonError:
        return json.loads_or_none(raw), False
