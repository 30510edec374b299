"""What the engines have in common: asking for ids and logprobs, reading them out of any shape, taking them out again.

An engine's own file says what differs: what to ask for, what an answer looks like when nobody asked, what it counts.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import orjson

from capture.assemble import Assembler
from capture.codes import why
from capture.record import CLAMPED, FIELDS, Completion, Ids, TokenCapture, Unavailable, is_logprob

CHAT: Final = "openai-chat"
COMPLETIONS: Final = "openai-completions"
WIRES: Final = (CHAT, COMPLETIONS)

#: Events larger than this have their prompt ids cut out as bytes instead of being parsed.
CUT_ABOVE: Final = 4096
_PROMPT_KEYS: Final = (b'"prompt_token_ids":', b'"input_ids":')

Question = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Wants:
    """What is wanted of a call besides what the agent asked for."""

    capture: bool = True
    top_logprobs: int | None = None
    buffered: bool = False


@dataclass(slots=True)
class Ask:
    """A call as it goes to the engine.

    `unstreamed`: the agent asked for a stream, but the engine has to be called without one; the answer is streamed to
    the agent from what came whole. `injected` names what was added, to recognise a refusal that names one of them.
    """

    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    unstreamed: bool = False
    injected: tuple[str, ...] = ()
    requested: dict[str, Any] = field(
        default_factory=lambda: {"logprobs": False, "top_logprobs": None, "token_ids": False}
    )
    unavailable: dict[str, Unavailable] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hide:
    """What the agent did not ask for, and so does not get."""

    logprobs: bool = True
    ids: bool = True
    usage: bool = True


class Engine:
    """What an engine's file may change. This one asks for nothing: the engine `other`."""

    name: ClassVar[str] = "other"
    #: Keys that an answer nobody asked anything of carries with null: they are set to null, not taken away.
    null_when_unasked: ClassVar[frozenset[str]] = frozenset()
    #: Keys of a stream's last chunk, which is the count's where one is asked for and the finish's where none is.
    on_last_chunk: ClassVar[tuple[str, ...]] = ()

    def ask(self, wire: str, body: dict[str, Any], wants: Wants) -> Ask:
        """The call to make for an agent's `body` (which is not changed)."""
        return Ask(dict(body), unavailable=dict.fromkeys(FIELDS, why("engine_unsupported")))

    def refused(self, ask: Ask, status: int, error: object) -> bool:
        """Whether a 4xx answer is about something that we added: its text names one of the fields."""
        text = orjson.dumps(error, default=str).decode().lower() if error is not None else ""
        return any(name.lower() in text for name in ask.injected)

    def reader(self, wire: str, body: dict[str, Any], ask: Ask) -> Reader:
        return Reader(self, wire, body, ask)

    def questions(self, reader: Reader) -> Generator[Question, Any, None] | None:
        """Further requests, `(path, body)`, whose JSON answers are sent back in; None where the answer says it all."""
        return None

    def sampled_count(self, reader: Reader) -> int | None:
        """How many sampled tokens the engine says there are, over all choices; None when it does not say."""
        return _count(reader.usage, "completion_tokens")

    def prompt_count(self, reader: Reader) -> int | None:
        """How many prompt tokens the engine says there are, over all prompts; None when it does not say."""
        return _count(reader.usage, "prompt_tokens")

    def streamed_ids_lost(self, reader: Reader) -> str:
        """The code for a stream that was cut before its ids came."""
        return "stream_aborted"


class _Choice:
    """What one choice sampled so far."""

    __slots__ = ("entry_ids", "finished", "ids", "logprobs", "problem", "prompt", "saw_logprobs", "tokens", "top")

    def __init__(self) -> None:
        self.ids: list[int] | None = None
        self.entry_ids: list[int] | None = []
        self.prompt: Ids | None = None
        self.logprobs: list[Any] = []
        self.tokens: list[str] = []
        self.top: list[Any] = []
        self.saw_logprobs = False
        self.problem: str | None = None
        self.finished = False


class Reader:
    """One call's answer: takes ids and logprobs out, gives what the agent would have got, keeps the body."""

    def __init__(self, engine: Engine, wire: str, body: dict[str, Any], ask: Ask) -> None:
        self.engine = engine
        self.wire = wire
        self.request = body
        self.ask = ask
        self.hide = hidden(wire, body)
        self.began = False
        self.error: Any = None
        self.usage: dict[str, Any] = {}
        self.expected = _expected(wire, body)
        self.prompt: Ids | None = None
        self.choices: dict[int, _Choice] = {}
        self._finished = 0
        self._assembler = Assembler()
        self._whole: dict[str, Any] | None = None
        self._unreadable = False
        self._mutes = bool(ask.injected or ask.headers)
        self._last: dict[str, Any] | None = None
        self._keeps_last = bool(engine.on_last_chunk) and "stream_options" in ask.injected

    @property
    def finished(self) -> bool:
        """Every choice that was asked for has its finish reason."""
        return self._finished >= self.expected

    # a stream

    def event(self, data: bytes) -> bytes | None:
        """One event's JSON text in; what the agent gets out: the same object when nothing had to change, or None.

        Never raises: what cannot be read is passed on as it is.
        """
        self.began = True
        text, cut = self._cut(data)
        chunk = _loads(text)
        if not isinstance(chunk, dict):
            self._unreadable = True
            return data
        if _is_error(chunk):
            self.error = chunk
            self._assembler.add({**chunk, "choices": []})
            return data
        self._take(chunk)
        self._assembler.add(chunk)
        if not self._mutes:
            return data
        if self._only_ours(chunk):
            if self._last is None or not isinstance(chunk.get("usage"), dict):
                return None
            moved = {name: chunk[name] for name in self.engine.on_last_chunk if name in chunk}
            self._last.update(moved)
            return self.rest()
        changed = self._strip(chunk) or cut
        if self._keeps_last and self.finished and self._last is None:
            self._last = chunk  # what belongs on the last chunk comes with the count, which the agent does not get
            return None
        return _dumps(chunk) if changed else data

    def rest(self) -> bytes | None:
        """The chunk that was kept back for the engine's count, which never came; for the end of a stream."""
        last, self._last, self._keeps_last = self._last, None, False
        return None if last is None else _dumps(last)

    def _only_ours(self, chunk: dict[str, Any]) -> bool:
        """Whether a chunk exists only because we asked: the counts, the ids, a step without visible text."""
        choices = chunk.get("choices")
        if not choices:
            if "sglext" in chunk and self.hide.ids:
                return True
            return self.hide.usage and isinstance(chunk.get("usage"), dict)
        if not (self.hide.ids and (self.hide.logprobs or self.wire == CHAT)):
            return False
        return all(
            isinstance(one, dict)
            and one.get("finish_reason") is None
            and isinstance(one.get("delta"), dict)
            and all(value is None for value in one["delta"].values())
            for one in choices
        )

    # an answer that came whole

    def body(self, data: bytes) -> bytes:
        """An unstreamed answer in; what the agent gets out."""
        self.began = True
        text, cut = self._cut(data)
        whole = _loads(text)
        if not isinstance(whole, dict):
            self._unreadable = True
            return data
        if _is_error(whole):
            self.error = whole
        self._take(whole)
        given = data
        if self._mutes and (self._strip(whole) or cut):
            given = _dumps(whole)
        self._whole = whole
        return given

    # both

    def _cut(self, data: bytes) -> tuple[bytes, bool]:
        """Takes the array of prompt ids out of a large event as bytes: parsing it would hold up every other call.

        Sound because an unescaped quote cannot stand inside a JSON string: the key, as bytes, is always a key.
        """
        if len(data) <= CUT_ABOVE or not self.hide.ids or self._several_prompts():
            return data, False
        for key in _PROMPT_KEYS:
            start = data.find(key)
            opening = data.find(b"[", start, start + len(key) + 2) if start >= 0 else -1
            closing = data.find(b"]", opening) if opening >= 0 else -1
            ids = Ids.parse(data[opening : closing + 1]) if closing - opening > CUT_ABOVE // 2 else None
            if ids is not None:
                self.prompt = self.prompt or ids
                # Each of n choices may carry the same prompt.
                return data.replace(data[start : closing + 1], data[start:opening] + b"null"), True
        return data, False

    def _take(self, body: dict[str, Any]) -> None:
        """Reads ids, logprobs, counts and finish reasons of a chunk or a whole body, in any version's shape."""
        if isinstance(body.get("usage"), dict):
            self.usage = body["usage"]
        ext = body.get("sglext")
        ext = ext if isinstance(ext, dict) else {}
        if self.prompt is None:
            self.prompt = _ids(body.get("prompt_token_ids"), ext.get("input_ids"))
        choices = body.get("choices")
        for position, part in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(part, dict):
                index = part.get("index")
                self._choice(index if type(index) is int else position, part)
        outputs = ext.get("output_ids")
        if isinstance(outputs, list):
            for index, ids in enumerate(outputs):
                choice = self.choices.setdefault(index, _Choice())
                if choice.ids is None and _is_ids(ids):
                    choice.ids = ids

    def _choice(self, index: int, part: dict[str, Any]) -> None:
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = _Choice()
        if part.get("finish_reason") is not None and not choice.finished:
            choice.finished = True
            self._finished += 1
        for place in (part, part.get("provider_specific_fields"), part.get("raw_output"), part.get("message")):
            if not isinstance(place, dict):
                continue
            ids = place.get("token_ids")
            if ids is None:
                ids = place.get("response_token_ids")
            if ids is None:
                ids = place.get("completion_token_ids")
            if ids is not None:
                if not _is_ids(ids):
                    choice.problem = choice.problem or "ids_malformed"
                elif choice.ids is None:
                    choice.ids = list(ids)
                else:
                    choice.ids += ids
            prompt = place.get("prompt_token_ids")
            if prompt is not None and choice.prompt is None:
                choice.prompt = Ids.from_json(prompt)
            if ids is not None:
                break
        logprobs = part.get("logprobs")
        if isinstance(logprobs, dict):
            self._logprobs(choice, logprobs, len(part.get("token_ids") or ()))

    def _logprobs(self, choice: _Choice, logprobs: dict[str, Any], sampled: int) -> None:
        content = logprobs.get("content")
        if isinstance(content, list):
            choice.saw_logprobs = True
            for entry in content:
                self._entry(choice, entry if isinstance(entry, dict) else {})
            return
        values = logprobs.get("token_logprobs")
        if not isinstance(values, list):
            return
        choice.saw_logprobs = True
        tokens, top = logprobs.get("tokens"), logprobs.get("top_logprobs")
        if self.request.get("echo") and sampled and len(values) > sampled:
            # vLLM puts the prompt's logprobs before those of the sampled tokens (0.32, completions with echo).
            skip = len(values) - sampled
            values = values[skip:]
            tokens = tokens[skip:] if isinstance(tokens, list) else tokens
            top = top[skip:] if isinstance(top, list) else top
        for place, value in enumerate(values):
            token = tokens[place] if isinstance(tokens, list) and place < len(tokens) else ""
            entry = {"token": token, "logprob": value}
            if isinstance(top, list) and place < len(top) and isinstance(top[place], dict):
                entry["top_logprobs"] = [{"token": name, "logprob": p} for name, p in top[place].items()]
            self._entry(choice, entry)

    def _entry(self, choice: _Choice, entry: dict[str, Any]) -> None:
        value, token = entry.get("logprob"), entry.get("token")
        if is_logprob(value):
            choice.logprobs.append(value)
        else:
            # The position is kept, the value is not: no sentinel stands for a logprob that nobody has.
            choice.logprobs.append(None)
            clamped = isinstance(value, int | float) and not isinstance(value, bool) and value <= CLAMPED
            choice.problem = choice.problem or ("logprob_clamped" if clamped else "logprob_missing_for_token")
        token = token if isinstance(token, str) else ""
        if choice.entry_ids is not None:
            told = entry.get("token_id", entry.get("id"))
            if told is None and token.startswith("token_id:") and token[9:].isdigit():
                told = int(token[9:])
            if type(told) is int and told >= 0:
                choice.entry_ids.append(told)
            else:
                choice.entry_ids = None
        choice.tokens.append(token)
        wanted = self.ask.requested.get("top_logprobs")
        if wanted:
            top = entry.get("top_logprobs")
            choice.top.append(
                [{k: one.get(k) for k in ("token", "logprob")} for one in top[:wanted] if isinstance(one, dict)]
                if isinstance(top, list)
                else []
            )

    def _strip(self, body: dict[str, Any]) -> bool:
        """Takes out what the agent did not ask for; whether anything was."""
        changed = False
        if self.hide.ids:
            changed |= self._mute(body, "prompt_token_ids")
            if body.pop("sglext", None) is not None:
                changed = True
        for part in body.get("choices") or ():
            if not isinstance(part, dict):
                continue
            if self.hide.logprobs and part.get("logprobs") is not None:
                changed |= self._mute(part, "logprobs")
            if self.hide.ids:
                changed |= self._mute(part, "token_ids")
                changed |= self._mute(part, "prompt_token_ids")
                changed |= self._mute(part, "response_token_ids")
        if self.hide.usage and self.request.get("stream") and not self.ask.unstreamed and body.get("usage") is not None:
            body.pop("usage")
            changed = True
        return changed

    def _mute(self, place: dict[str, Any], key: str) -> bool:
        if key not in place:
            return False
        if key in self.engine.null_when_unasked:
            if place[key] is None:
                return False
            place[key] = None
        else:
            del place[key]
        return True

    # the record

    def assembled(self) -> dict[str, Any]:
        """The completed body in the agent's shape: token ids never, logprobs only where it asked and did not stream."""
        if self._whole is None:
            return self._assembler.body()
        body = {name: value for name, value in self._whole.items() if name not in ("prompt_token_ids", "sglext")}
        choices = body.get("choices")
        if isinstance(choices, list):
            body["choices"] = [
                _without_ids(one, self.hide.logprobs or bool(self.request.get("stream"))) for one in choices
            ]
        return body

    def capture(self, outcome: str, *, status: int) -> TokenCapture:
        """What was sampled, with a reason for whatever is missing. `outcome` is ok, error, aborted or truncated."""
        if outcome == "error" or status >= 400:
            missing = dict.fromkeys(FIELDS, why("upstream_http_error", status=status))
            return self._made([], missing)
        indexes = sorted(self.choices)
        missing = dict(self.ask.unavailable)
        completions = [self._completion(index) for index in indexes]
        if outcome in ("aborted", "truncated"):
            self._cut_short(outcome, completions, missing)
        else:
            self._check(completions, missing)
        return self._made(completions, missing)

    def _made(self, completions: list[Completion], missing: dict[str, Unavailable]) -> TokenCapture:
        several = self._several_prompts()
        return TokenCapture.of(
            wire=self.wire,
            provider=self.engine.name,
            requested=self.ask.requested,
            prompt_token_ids=None if several else self._prompt(),
            completions=completions,
            unavailable=missing,
        )

    def _several_prompts(self) -> bool:
        return self.wire == COMPLETIONS and prompts(self.request) > 1

    def _prompt(self) -> Ids | None:
        if self.prompt is not None:
            return self.prompt
        return next((one.prompt for one in self.choices.values() if one.prompt is not None), None)

    def _completion(self, index: int) -> Completion:
        choice = self.choices[index]
        ids = choice.ids
        if ids is None and choice.entry_ids and choice.saw_logprobs:
            ids = choice.entry_ids
        return Completion(
            index=index,
            token_ids=None if ids is None else Ids.of(ids),
            tokens=choice.tokens if choice.saw_logprobs else None,
            logprobs=choice.logprobs if choice.saw_logprobs else ([] if ids == [] else None),
            top_logprobs=choice.top if choice.top else None,
            prompt_token_ids=choice.prompt if self._several_prompts() else None,
        )

    def _cut_short(self, outcome: str, completions: list[Completion], missing: dict[str, Unavailable]) -> None:
        code = "stream_aborted" if outcome == "aborted" else "stream_error"
        lost = self.engine.streamed_ids_lost(self)
        no_ids = not completions or any(one.token_ids is None for one in completions)
        missing.setdefault("completion_token_ids", why(lost if no_ids and outcome == "aborted" else code))
        missing.setdefault("logprobs", why(code))
        if self._prompt() is None:
            missing.setdefault("prompt_token_ids", why(lost if outcome == "aborted" else code))

    def _check(self, completions: list[Completion], missing: dict[str, Unavailable]) -> None:
        """Holds a finished call to the engine's own counts."""
        streamed = bool(self.request.get("stream")) and not self.ask.unstreamed
        tokens = _count(self.usage, "completion_tokens") or 0
        if self._unreadable:
            for name in FIELDS:
                missing.setdefault(name, why("answer_unreadable"))
        if len(completions) < self.expected:
            for name in ("completion_token_ids", "logprobs"):
                missing.setdefault(name, why("choices_missing"))
        for index in sorted(self.choices):
            problem = self.choices[index].problem
            if problem:
                missing.setdefault("completion_token_ids" if problem == "ids_malformed" else "logprobs", why(problem))
        if any(one.token_ids is None for one in completions):
            hidden = self.request.get("include_reasoning") is False
            code = "hidden_by_include_reasoning" if hidden else "server_ignored_return_token_ids"
            missing.setdefault("completion_token_ids", why(code))
        if any(one.logprobs is None for one in completions):
            hidden = self.request.get("include_reasoning") is False
            missing.setdefault("logprobs", why("hidden_by_include_reasoning" if hidden else "logprobs_not_returned"))
        self._check_prompt(completions, missing)
        if "completion_token_ids" in missing:
            return
        sampled = sum(len(one.token_ids or ()) for one in completions)
        told = self.engine.sampled_count(self)
        if told is None:
            missing["completion_token_ids"] = why("usage_not_returned")
        elif sampled != told:
            lost = sampled < told and streamed and bool(self.request.get("tools"))
            code = "streamed_tokens_dropped_by_parser" if lost else "count_mismatch_usage"
            missing["completion_token_ids"] = why(code, sampled=sampled, told=told)
        if "logprobs" in missing:
            return
        held = sum(len(one.logprobs or ()) for one in completions)
        if any(len(one.logprobs or ()) != len(one.token_ids or ()) for one in completions):
            code = "logprobs_incomplete_in_stream" if streamed and held < tokens else "count_mismatch_ids_logprobs"
            missing["logprobs"] = why(code, sampled=sampled, told=held)

    def _check_prompt(self, completions: list[Completion], missing: dict[str, Unavailable]) -> None:
        if "prompt_token_ids" in missing:
            return
        told = self.engine.prompt_count(self)
        if self._several_prompts():
            if any(one.prompt_token_ids is None for one in completions):
                missing["prompt_token_ids"] = why("several_prompts")
            return
        prompt = self._prompt()
        if prompt is None:
            missing["prompt_token_ids"] = why("no_prompt_ids")
        elif told is not None and told != len(prompt):
            missing["prompt_token_ids"] = why("count_mismatch_usage", sampled=len(prompt), told=told)


def prompts(body: dict[str, Any]) -> int:
    """How many prompts a completions request holds."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def _expected(wire: str, body: dict[str, Any]) -> int:
    n = body.get("n")
    return (n if type(n) is int and n > 0 else 1) * (prompts(body) if wire == COMPLETIONS else 1)


def hidden(wire: str, body: dict[str, Any]) -> Hide:
    logprobs = body.get("logprobs")
    asked = logprobs is True if wire == CHAT else logprobs is not None and logprobs is not False
    options = body.get("stream_options")
    return Hide(
        logprobs=not asked,
        ids=not (
            body.get("return_token_ids")
            or body.get("return_input_ids_in_sglext")
            or body.get("return_output_ids_in_sglext")
        ),
        usage=not (isinstance(options, dict) and options.get("include_usage")),
    )


def _ids(*places: Any) -> Ids | None:
    return next((ids for place in places if place is not None and (ids := Ids.from_json(place)) is not None), None)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


def _is_error(body: dict[str, Any]) -> bool:
    return (body.get("error") is not None and "choices" not in body) or body.get("object") == "error"


def _without_ids(choice: Any, no_logprobs: bool) -> Any:
    if not isinstance(choice, dict):
        return choice
    kept = {
        name: value
        for name, value in choice.items()
        if name not in ("token_ids", "prompt_token_ids", "response_token_ids", "routed_experts")
    }
    if no_logprobs and kept.get("logprobs") is not None:
        kept["logprobs"] = None
    return kept


def _count(usage: dict[str, Any], name: str) -> int | None:
    value = usage.get(name)
    return value if type(value) is int else None


def _loads(data: bytes) -> Any:
    """JSON as engines write it: strict, or with Python's NaN."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except (orjson.JSONEncodeError, TypeError):
        return json.dumps(value, separators=(",", ":")).encode()
