"""Reads one call's answer: collects what was sampled, filters what the agent gets, and keeps the completed body."""

from __future__ import annotations

from typing import Any, Final

import orjson

from capture import json
from capture.chat.assemble import Assembler, without_ids
from capture.engines.answer.answer import Answer
from capture.engines.answer.choices import prompts_cut
from capture.engines.answer.fast_chunk import MUTED, Parts, opening, parts
from capture.engines.base import Engine
from capture.engines.completeness import of_cut_short, of_failed, of_finished
from capture.engines.request import UpstreamRequest
from capture.engines.wires import CHAT
from capture.errors import JsonError
from capture.record import Completion, Ids, TokenCapture

#: Of n choices each may come with the prompt again; where it is shorter than this it is parsed.
CUT_AGAIN: Final = 4096
#: The name of an event that is an error, whatever its data looks like.
ERROR_EVENT: Final = b"error"
_PROMPT_KEYS: Final = (b'"prompt_token_ids":', b'"input_ids":')


class Reader(Answer):
    """Feed it the answer's events (`event`, or `chunk` for a dialect), or its `body`; then ask for the `capture`."""

    def __init__(self, engine: Engine, wire: str, request: dict[str, Any], upstream: UpstreamRequest) -> None:
        super().__init__(wire, request, upstream, echoes=engine.echoes_logprobs)
        self.engine = engine
        self.hide = engine.response_filter(wire, request)
        #: The ids of an earlier prompt, which this call's may continue: what is the same is not checked again.
        self.prompt_before: Ids | None = None
        self._assembler = Assembler()
        self._whole: dict[str, Any] | None = None
        self._weight_versions: list[Any] | None = None
        self._lenient = False
        self._mutes = bool(upstream.injected or upstream.headers)
        self._steps_are_ours = engine.empty_steps_are_ours(self.hide)
        #: Whether the chunks of one token may be read by their parts; and what they begin with, once that is known.
        self._is_regular = (
            wire == CHAT and self.expected == 1 and not self.sampled.top and self._mutes and self._steps_are_ours
            and self.hide.logprobs and self.hide.sampled and self.hide.nulls >= MUTED
        )  # fmt: skip
        self._begins: bytes | None = None
        self._last: bytes | None = None
        self._keeps_last = bool(engine.on_last_chunk) and "stream_options" in upstream.injected

    # a stream

    def event(self, data: bytes, name: bytes | None = None) -> bytes | None:
        """One event's JSON text in, and its `name` where it has one; what the agent gets out: the same object when
        nothing had to change, or None.

        The bytes are two events, each with its `data: `, where a chunk that was held back has to go first.
        Never raises: what cannot be parsed is passed on unchanged.
        """
        if name == ERROR_EVENT:
            self._fail(self._loads(data) or data.decode("utf-8", "replace"))
            return data
        start = self._begins
        if start is not None and data.startswith(start) and (found := self._parts(data, start)) is not None:
            return found.given if found.given is None or found.finish is None else self._unless_last(found.given)
        chunk, cut = self._taken(data)
        if chunk is None or not self._mutes:
            return data
        if self.hide.is_ours(chunk, steps=self._steps_are_ours):
            return self._last_with(chunk) if self._last is not None and isinstance(chunk.get("usage"), dict) else None
        changed = self._strip(chunk)
        if changed and cut and not self.hide.prompt:
            chunk = self._uncut(data)
        given = self._dumps(chunk, data) if changed else data
        if self._is_regular and self._begins is None and changed and chunk.get("usage") is None:
            start = opening(data)
            self._begins = start if start is not None and given.startswith(start) else None
        before = self.rest() if self._last is not None else None
        # The chunk that was held back was not the last: both go out, in order.
        return self._unless_last(given) if before is None else before + b"\n\ndata: " + given.replace(b"\n", b" ")

    def chunk(self, data: bytes, name: bytes | None = None) -> dict[str, Any] | None:
        """One event's JSON text in, for a dialect that translates it: the chunk as parsed, nothing taken out.

        Of a regular chunk, whose logprob nobody asked for, its text and its finish alone. None for an error, which
        `error` then holds, and for what cannot be read. Never raises.
        """
        if name == ERROR_EVENT:
            self._fail(self._loads(data) or data.decode("utf-8", "replace"))
            return None
        start = self._begins
        if start is not None and data.startswith(start) and (found := self._parts(data, start)) is not None:
            delta = {} if found.field is None else {found.field: found.text}
            choice = {"index": 0, "delta": delta, "finish_reason": found.finish}
            if found.finish is not None:
                choice["stop_reason"] = found.stop
            return {"choices": [choice]}
        chunk, cut = self._taken(data)
        if cut and not self.hide.prompt:
            chunk = self._loads(data)
        if self._is_regular and self._begins is None and chunk is not None and chunk.get("usage") is None:
            self._begins = opening(data)
        return chunk

    def _parts(self, data: bytes, start: bytes) -> Parts | None:
        """Takes a regular chunk, as `_taken` would; None where it has to be parsed."""
        choice = self.sampled.choices.get(0)
        if choice is None or choice.finish_reason is not None or self._last is not None:
            return None
        found = parts(data, start)
        if found is not None:
            choice.one_token(found.token_id, found.logprob, found.token)
            self._assembler.add_text(0, found.field, found.text)
            if found.finish is not None:
                self.sampled.finish(choice, found.finish)
                self._assembler.finish(0, found.finish, found.stop)
        return found

    def _taken(self, data: bytes) -> tuple[dict[str, Any] | None, bool]:
        """The chunk, its ids, logprobs and text recorded; and whether its prompt ids were cut out of it."""
        self.started = True
        chunk, cut = self._parsed(data)
        if not isinstance(chunk, dict):
            self.unreadable = True
            return None, cut
        if _is_error(chunk):
            self._fail(chunk)
            return None, cut
        self.sampled.take(chunk)
        self._assembler.add(chunk)
        return chunk, cut

    def _fail(self, error: Any) -> None:
        """An error in the stream, in place of a chunk."""
        self.started = True
        self.error = error if isinstance(error, dict) else {"error": {"message": str(error)}}
        self._assembler.fail(self.error)

    def _unless_last(self, given: bytes) -> bytes | None:
        """Holds the last chunk back: fields that belong on it come with the usage chunk, which the agent does not
        get.
        """
        if self._keeps_last and self.finished:
            self._last = given
            return None
        return given

    def _last_with(self, count: dict[str, Any]) -> bytes | None:
        """The chunk that was held back, with the fields that came on the usage chunk."""
        last = self.rest()
        more = {name: count[name] for name in self.engine.on_last_chunk if name in count}
        if last is None or not more:
            return last
        return self._dumps(self._loads(last) | more, last)

    def rest(self) -> bytes | None:
        """The chunk that was held back for a usage chunk that did not come; for the end of a stream."""
        last, self._last, self._keeps_last = self._last, None, False
        return last

    # an answer that came whole

    def body(self, data: bytes) -> bytes:
        """An unstreamed answer in; what the agent gets out. Never raises."""
        self.started = True
        whole, cut = self._parsed(data)
        if not isinstance(whole, dict):
            self.unreadable = True
            return data
        if _is_error(whole):
            self.error = whole
        self.sampled.take(whole)
        self.sampled.check_indexes(whole)
        self._weight_versions = self.engine.weight_versions(whole)
        given = data
        if self._mutes and self._strip(whole):
            given = self._dumps(self._uncut(data) if cut and not self.hide.prompt else whole, data)
        self._whole = whole
        return given

    # both

    def _parsed(self, data: bytes) -> tuple[Any, bool]:
        """The JSON value, and whether the prompt's ids were cut out of it as bytes and replaced by `false`.

        Parsing 100,000 ids would delay every other call. Sound because an unescaped quote cannot stand inside a JSON
        string: the key, as bytes, is always a key; and because it is looked at what it is a key of.
        """
        known = self.several_prompts or (self.sampled.prompt is not None and len(data) < CUT_AGAIN)
        for key in () if known else _PROMPT_KEYS:
            start = data.find(key)
            first = data.find(b"[", start, start + len(key) + 2) if start >= 0 else -1
            last = data.find(b"]", first) if first >= 0 else -1
            ids = Ids.parse(data[first : last + 1], self.prompt_before) if last >= 0 else None
            if ids is None:
                continue
            rest, count = data[last + 1 :], 1
            if key in rest:  # each of n choices may carry the same prompt
                array = data[start : last + 1]
                count += rest.count(array)
                rest = rest.replace(array, key + b"false")
            value = self._loads(data[:first] + b"false" + rest)
            if isinstance(value, dict) and prompts_cut(value) == count:
                self.sampled.take_prompt(ids)
                return value, True
        return self._loads(data), False

    def _uncut(self, data: bytes) -> dict[str, Any]:
        """What `data` holds, less what the agent did not ask for, where the prompt's ids are not among that."""
        whole: dict[str, Any] = self._loads(data)
        self._strip(whole)
        return whole

    def _strip(self, body: dict[str, Any]) -> bool:
        return self.hide.strip(body, streamed=self.streamed)

    def _loads(self, data: bytes) -> Any:
        """JSON as engines write it; None for anything else."""
        try:
            return json.loads_strict(data)
        except JsonError:
            pass
        try:
            value = json.loads(data)
        except JsonError:
            return None
        # Such chunks go out as Python writes them, which taking a chunk by its parts would not do.
        self._lenient, self._is_regular, self._begins = True, False, None
        return value

    def _dumps(self, value: Any, data: bytes) -> bytes:
        """`value` as JSON, as it came where that was not strict; `data`, what it was read from, where it is nested
        deeper than anybody writes.
        """
        if not self._lenient:
            try:
                return orjson.dumps(value)
            except TypeError:  # nested deeper than orjson writes, or integers beyond 64 bits
                pass
        try:
            return json.dumps_as_read(value)
        except JsonError:
            return data

    # the record

    def assembled(self) -> dict[str, Any]:
        """The completed body in the agent's shape: token ids never, logprobs only where it asked and did not stream."""
        if self._whole is None:
            return self._assembler.body()
        body = without_ids(self._whole)
        choices = body.get("choices")
        if isinstance(choices, list) and (self.hide.logprobs or self.request.get("stream")):
            body["choices"] = [
                {**choice, "logprobs": None}
                if isinstance(choice, dict) and choice.get("logprobs") is not None
                else choice
                for choice in choices
            ]
        return body

    def weight_versions(self) -> list[Any] | None:
        """Per choice, which weights sampled which of its ids, where the engine says so."""
        return self._weight_versions

    @property
    def nothing_sampled(self) -> bool:
        """Whether no token came, in ids, logprobs or text: a stream may open its message before it fails."""
        if self._whole is not None:
            return not self.sampled.choices
        return self._assembler.is_empty and not any(
            choice.ids or choice.logprobs for choice in self.sampled.choices.values()
        )

    @property
    def _broke_off(self) -> bool:
        """Whether the engine itself ended the reply too early, and not the connection."""
        whole = self.finished or not self.streamed or bool(self.sampled.error)
        return whole and self.unfinished is not None

    def capture(self, outcome: str, *, status: int, failure: str | None = None) -> TokenCapture:
        """What was sampled, with a reason for whatever is missing. `outcome` is ok, error, aborted or truncated.

        `failure`: what happened to a call that ended in an error which is not the engine's answer.
        """
        completions: list[Completion] = []
        if outcome == "error" or status >= 400:
            missing = of_failed(status, failure)
        else:
            completions = self.sampled.completions(several_prompts=self.several_prompts)
            if outcome == "aborted" or self.error is not None or (outcome == "truncated" and not self._broke_off):
                missing = of_cut_short(self.engine, self, outcome, completions)
            else:
                missing = of_finished(self.engine, self, completions)
        return TokenCapture.of(
            wire=self.wire,
            provider=self.engine.name,
            requested=self.upstream.requested,
            prompt_token_ids=None if self.several_prompts else self.sampled.prompt_ids(),
            completions=completions,
            unavailable=missing,
        )


def _is_error(body: dict[str, Any]) -> bool:
    return (bool(body.get("error")) and not body.get("choices")) or body.get("object") == "error"
