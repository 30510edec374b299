"""One call's answer: takes out what was sampled, gives the agent what it would have got, and keeps the body."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from capture.assemble import ID_KEYS, NESTED, Assembler, without_ids
from capture.codes import why
from capture.engines.regular import Parts, opening, parts
from capture.engines.sampled import Sampled
from capture.record import FIELDS, Completion, Ids, TokenCapture, Unavailable

if TYPE_CHECKING:
    from capture.engines.base import Ask, Engine

CHAT: Final = "openai-chat"
COMPLETIONS: Final = "openai-completions"

#: Events larger than this have their prompt ids cut out as bytes instead of being parsed.
CUT_ABOVE: Final = 4096
_PROMPT_KEYS: Final = (b'"prompt_token_ids":', b'"input_ids":')
_EXT_KEYS: Final = ("input_ids", "output_ids")


@dataclass(frozen=True, slots=True)
class Hide:
    """What the agent did not ask for, and so does not get."""

    logprobs: bool = True
    prompt: bool = True
    sampled: bool = True
    usage: bool = True


class Reader:
    """Give it the answer's events, or its whole body; then ask it for the record."""

    def __init__(self, engine: Engine, wire: str, body: dict[str, Any], ask: Ask) -> None:
        self.engine = engine
        self.wire = wire
        self.request = body
        self.ask = ask
        self.hide = engine.hidden(wire, body)
        self.began = False
        self.error: Any = None
        self.several_prompts = wire == COMPLETIONS and prompts(body) > 1
        self.expected = _expected(wire, body)
        self.sampled = Sampled(
            echo=engine.echoes_logprobs and wire == COMPLETIONS and bool(body.get("echo")),
            top=_positive(ask.requested.get("top_logprobs")),
        )
        self._assembler = Assembler()
        self._whole: dict[str, Any] | None = None
        self._unreadable = False
        self._lenient = False
        self._mutes = bool(ask.injected or ask.headers)
        self._regular: bytes | None = None
        self._last: tuple[dict[str, Any], bytes] | None = None
        self._keeps_last = bool(engine.on_last_chunk) and "stream_options" in ask.injected

    @property
    def finished(self) -> bool:
        """Every choice that was asked for has its finish reason."""
        return self.sampled.finished >= self.expected

    @property
    def streamed(self) -> bool:
        """Whether the engine itself was asked to stream."""
        return bool(self.request.get("stream")) and not self.ask.unstreamed

    @property
    def usage(self) -> dict[str, Any]:
        """The engine's last word on its counts; empty while there is none."""
        return self.sampled.usage

    def told(self, name: str) -> int | None:
        """A count of the engine's usage; None when it does not say."""
        value = self.sampled.usage.get(name)
        return value if type(value) is int else None

    # a stream

    def event(self, data: bytes) -> bytes | None:
        """One event's JSON text in; what the agent gets out: the same object when nothing had to change, or None.

        Two events, each with its `data: `, where one was kept back that had to go first.
        Never raises: what cannot be read is passed on as it is.
        """
        begins = self._regular
        if begins is not None and data.startswith(begins) and (found := self._take_parts(data, begins)) is not None:
            return found.given
        chunk, cut = self._taken(data)
        if chunk is None or not self._mutes:
            return data
        if self._only_ours(chunk):
            if self._last is None or not isinstance(chunk.get("usage"), dict):
                return None
            self._last[0].update({name: chunk[name] for name in self.engine.on_last_chunk if name in chunk})
            return self.rest()
        shown = cut and not self.hide.prompt
        changed = self._strip(chunk) or (cut and not shown)
        if shown and (changed or self.finished):
            chunk = self._uncut(data)
        if self._keeps_last and self._last is None and self.finished:
            self._last = chunk, data  # what belongs on the last chunk comes with the count, which is not the agent's
            return None
        given = self._dumps(chunk, data) if changed else data
        if self._regular is None and changed:
            self._look_for_regular(data, given)
        before = self.rest() if self._last is not None else None
        # What should have been the last chunk was not: both go out, in the order they came in.
        return given if before is None else before + b"\n\ndata: " + given.replace(b"\n", b" ")

    def _look_for_regular(self, data: bytes, given: bytes) -> None:
        """Whether the chunks that begin as this one may be read by their parts: where both ways lead to the same."""
        begins = self._opening(data)
        found = None if begins is None else parts(data, begins)
        if found is not None and found.given == given:
            self._regular = begins

    def _opening(self, data: bytes) -> bytes | None:
        return opening(data) if self.wire == CHAT and self.expected == 1 and not self.sampled.top else None

    def _take_parts(self, data: bytes, begins: bytes) -> Parts | None:
        """Records a regular chunk, as `_taken` would; None where it has to be parsed."""
        choice, pieces = self.sampled.choices.get(0), self._assembler.pieces(0)
        if choice is None or pieces is None or self._last is not None or not choice.goes_on:
            return None
        found = parts(data, begins)
        held = None if found is None else pieces.get(found.field)
        if found is None or held is None:
            return None
        choice.one_token(found.token_id, found.logprob, found.token)
        held.append(found.text)
        return found

    def chunk(self, data: bytes) -> dict[str, Any] | None:
        """One event's JSON text in, for a dialect that translates it: the chunk as parsed, nothing taken out.

        Of a regular chunk, whose logprob nobody asked for, its text alone. None for an error, which `error` then holds,
        and for what cannot be read. Never raises.
        """
        begins = self._regular
        if begins is not None and data.startswith(begins) and (found := self._take_parts(data, begins)) is not None:
            return {"choices": [{"index": 0, "delta": {found.field: found.text}, "finish_reason": None}]}
        chunk, cut = self._taken(data)
        if cut and chunk is not None and not self.hide.prompt:
            chunk = self._loads(data)
        if begins is None and chunk is not None and self.hide.logprobs and chunk.get("usage") is None:
            begins = self._opening(data)
            if begins is not None and parts(data, begins) is not None:
                self._regular = begins
        return chunk

    def _taken(self, data: bytes) -> tuple[dict[str, Any] | None, bool]:
        """The chunk, its ids, logprobs and text recorded; and whether its prompt ids were cut out of it."""
        self.began = True
        text, cut = self._cut(data)
        chunk = self._loads(text)
        if not isinstance(chunk, dict):
            self._unreadable = True
            return None, cut
        if _is_error(chunk):
            self.error = chunk
            self._assembler.fail(chunk)
            return None, cut
        self.sampled.take(chunk)
        self._assembler.add(chunk)
        return chunk, cut

    def rest(self) -> bytes | None:
        """The chunk that was kept back for the engine's count, which never came; for the end of a stream."""
        last, self._last, self._keeps_last = self._last, None, False
        return None if last is None else self._dumps(*last)

    def _only_ours(self, chunk: dict[str, Any]) -> bool:
        """Whether a chunk exists only because we asked: the counts, the ids, a step without visible text."""
        choices = chunk.get("choices")
        if not choices:
            ext, usage = chunk.get("sglext"), isinstance(chunk.get("usage"), dict)
            if isinstance(ext, dict) and any(not self._hides_ext(name) for name in ext):
                return False
            return self.hide.usage if usage else isinstance(ext, dict)
        if not isinstance(choices, list) or not self.engine.step_is_ours(self.hide):
            return False
        for one in choices:
            if not isinstance(one, dict) or one.get("finish_reason") is not None:
                return False
            delta = one.get("delta")
            if not isinstance(delta, dict):
                return False
            for value in delta.values():
                if value is not None:
                    return False
        return True

    # an answer that came whole

    def body(self, data: bytes) -> bytes:
        """An unstreamed answer in; what the agent gets out. Never raises."""
        self.began = True
        text, cut = self._cut(data)
        whole = self._loads(text)
        if not isinstance(whole, dict):
            self._unreadable = True
            return data
        if _is_error(whole):
            self.error = whole
        self.sampled.take(whole)
        given = data
        if self._mutes:
            shown = cut and not self.hide.prompt
            if self._strip(whole) or (cut and not shown):
                given = self._dumps(self._uncut(data) if shown else whole, data)
        self._whole = whole
        return given

    # both

    def _cut(self, data: bytes) -> tuple[bytes, bool]:
        """Takes the array of prompt ids out of a large event as bytes: parsing it would hold up every other call.

        Sound because an unescaped quote cannot stand inside a JSON string: the key, as bytes, is always a key.
        """
        if len(data) <= CUT_ABOVE or self.several_prompts:
            return data, False
        for key in _PROMPT_KEYS:
            start = data.find(key)
            opening = data.find(b"[", start, start + len(key) + 2) if start >= 0 else -1
            closing = data.find(b"]", opening) if opening >= 0 else -1
            ids = Ids.parse(data[opening : closing + 1]) if closing - opening > CUT_ABOVE // 2 else None
            if ids is not None:
                if self.sampled.prompt is None:
                    self.sampled.prompt = ids
                # Each of n choices may carry the same prompt.
                return data.replace(data[start : closing + 1], data[start:opening] + b"null"), True
        return data, False

    def _uncut(self, data: bytes) -> dict[str, Any]:
        """What `data` holds, less what the agent did not ask for, where the prompt's ids are not among that."""
        whole: dict[str, Any] = self._loads(data)
        self._strip(whole)
        return whole

    def _strip(self, body: dict[str, Any]) -> bool:
        """Takes out what the agent did not ask for; whether anything was."""
        hide, changed = self.hide, False
        changed |= self._mute_ids(body)
        ext = body.get("sglext")
        if isinstance(ext, dict):
            left = {name: value for name, value in ext.items() if not self._hides_ext(name)}
            changed |= len(left) < len(ext)
            body["sglext"] = left
            if not left:
                del body["sglext"]
        choices = body.get("choices")
        for part in choices if isinstance(choices, list) else ():
            if not isinstance(part, dict):
                continue
            if hide.logprobs and part.get("logprobs") is not None:
                changed |= self._mute(part, "logprobs")
            changed |= self._mute_ids(part)
        if hide.usage and self.streamed and body.get("usage") is not None:
            del body["usage"]
            changed = True
        return changed

    def _mute_ids(self, place: dict[str, Any]) -> bool:
        changed = False
        if not ID_KEYS.isdisjoint(place):
            for key in ID_KEYS.intersection(place):
                if self.hide.prompt if key == "prompt_token_ids" else self.hide.sampled:
                    changed |= self._mute(place, key)
        if not NESTED.isdisjoint(place):
            for name in NESTED.intersection(place):
                if isinstance(place[name], dict):
                    left = without_ids(place[name]) if self.hide.prompt and self.hide.sampled else place[name]
                    changed |= len(left) < len(place[name])
                    place[name] = left
        return changed

    def _mute(self, place: dict[str, Any], key: str) -> bool:
        if key in self.engine.null_when_unasked:
            if place[key] is None:
                return False
            place[key] = None
        else:
            del place[key]
        return True

    def _hides_ext(self, name: str) -> bool:
        return name in _EXT_KEYS and (self.hide.prompt if name == "input_ids" else self.hide.sampled)

    def _loads(self, data: bytes) -> Any:
        """JSON as engines write it: strict, or with Python's NaN and lone surrogates; None for anything else."""
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError:
            pass
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        self._lenient = True  # such values go out as they came in, which orjson would not do
        return value

    def _dumps(self, value: Any, data: bytes) -> bytes:
        """`value` as JSON; `data`, what it was read from, where it is nested deeper than anybody writes."""
        if not self._lenient:
            try:
                return orjson.dumps(value)
            except TypeError:  # nested deeper than orjson writes, or integers beyond 64 bits
                pass
        try:
            return json.dumps(value, separators=(",", ":")).encode()
        except RecursionError:
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
                {**one, "logprobs": None} if isinstance(one, dict) and one.get("logprobs") is not None else one
                for one in choices
            ]
        return body

    def capture(self, outcome: str, *, status: int) -> TokenCapture:
        """What was sampled, with a reason for whatever is missing. `outcome` is ok, error, aborted or truncated."""
        completions: list[Completion] = []
        if outcome == "error" or status >= 400:
            missing = dict.fromkeys(FIELDS, why("upstream_http_error", status=status))
        else:
            missing = dict(self.ask.unavailable)
            completions = self.sampled.completions(several_prompts=self.several_prompts)
            if outcome in ("aborted", "truncated") or self.error is not None:
                self._cut_short(outcome, completions, missing)
            else:
                self._check(completions, missing)
        return TokenCapture.of(
            wire=self.wire,
            provider=self.engine.name,
            requested=self.ask.requested,
            prompt_token_ids=None if self.several_prompts else self.sampled.prompt_ids(),
            completions=completions,
            unavailable=missing,
        )

    def _cut_short(self, outcome: str, completions: list[Completion], missing: dict[str, Unavailable]) -> None:
        code = "stream_aborted" if outcome == "aborted" else "stream_error"
        lost = self.engine.ids_lost_by_cut(self) if outcome == "aborted" else code
        no_ids = not completions or any(one.token_ids is None for one in completions)
        missing.setdefault("completion_token_ids", why(lost if no_ids else code))
        missing.setdefault("logprobs", why(code))
        if self.sampled.prompt_ids() is None:
            missing.setdefault("prompt_token_ids", why(lost))

    def _check(self, completions: list[Completion], missing: dict[str, Unavailable]) -> None:
        """Holds a finished call to the engine's own counts."""
        known = set(missing)
        hidden = self.request.get("include_reasoning") is False
        if len(completions) < self.expected:
            for name in ("completion_token_ids", "logprobs"):
                missing.setdefault(name, why("choices_missing" if completions else "no_choices"))
        for choice in self.sampled.choices.values():
            if choice.malformed:
                missing.setdefault("completion_token_ids", why("ids_malformed"))
            if choice.problem:
                missing.setdefault("logprobs", why(choice.problem))
        if any(one.token_ids is None for one in completions):
            code = "hidden_by_include_reasoning" if hidden else self.engine.ids_missing(self)
            sampled = sum(len(one.token_ids or ()) for one in completions)
            told = self.told("completion_tokens")
            missing.setdefault("completion_token_ids", why(code, sampled=sampled, told="?" if told is None else told))
        if any(one.logprobs is None for one in completions):
            missing.setdefault("logprobs", why("hidden_by_include_reasoning" if hidden else "logprobs_not_returned"))
        self._check_prompt(missing)
        self._check_counts(completions, missing)
        if self._unreadable:
            # The counts say whether the part that could not be read held anything of what is missing.
            for name in set(missing) - known:
                missing[name] = why("answer_unreadable")

    def _check_prompt(self, missing: dict[str, Unavailable]) -> None:
        if self.several_prompts:
            missing.setdefault("prompt_token_ids", why("several_prompts"))
            return
        prompt, told = self.sampled.prompt_ids(), self.engine.prompt_count(self)
        if prompt is None:
            missing.setdefault("prompt_token_ids", why("no_prompt_ids"))
        elif told is not None and told != len(prompt):
            missing.setdefault("prompt_token_ids", why("count_mismatch_usage", sampled=len(prompt), told=told))

    def _check_counts(self, completions: list[Completion], missing: dict[str, Unavailable]) -> None:
        if "completion_token_ids" in missing:
            return
        sampled = sum(len(one.token_ids or ()) for one in completions)
        told = self.engine.sampled_count(self)
        if told is None:
            missing["completion_token_ids"] = why(self.engine.count_missing(self))
        elif sampled != told:
            code = self.engine.ids_lost(self, sampled, told)
            missing["completion_token_ids"] = why(code, sampled=sampled, told=told)
        if any(len(one.logprobs or ()) != len(one.token_ids or ()) for one in completions):
            held = sum(len(one.logprobs or ()) for one in completions)
            code = self.engine.logprobs_lost(self, sampled, held)
            missing.setdefault("logprobs", why(code, sampled=sampled, told=held))


def prompts(body: dict[str, Any]) -> int:
    """How many prompts a completions request holds."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def _expected(wire: str, body: dict[str, Any]) -> int:
    return (_positive(body.get("n")) or 1) * (prompts(body) if wire == COMPLETIONS else 1)


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _is_error(body: dict[str, Any]) -> bool:
    return (body.get("error") is not None and not body.get("choices")) or body.get("object") == "error"
