"""What an answer says was sampled: ids, logprobs and counts, from every place where any engine version puts them.

First hit wins: `choices[].token_ids`, `response_token_ids`, the same under `provider_specific_fields`, `raw_output` and
`message`, then `sglext.output_ids`, then ids inside the logprob entries (`token_id`, llama.cpp's `id`, and tokens
spelled `token_id:123`) where every entry has one. An empty list counts, null falls through, nothing is re-tokenized.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, Final

from capture.chat.assemble import NESTED, SAMPLED_IDS
from capture.json import objects
from capture.record import CLAMPED, ROUNDING, Completion, Ids, are_ids, are_logprobs, is_logprob

_LOGPROB: Final = itemgetter("logprob")
_TOKEN: Final = itemgetter("token")
#: The largest float: an int beyond it is no number of an engine's either.
LARGEST: Final = sys.float_info.max
_SPELLED: Final = re.compile(r"token_id:([0-9]{1,18})")


class Sampled:
    """What has arrived of one answer, whole or in chunks.

    `echo`: the logprobs of a completions call start with the prompt's. `top` alternatives per token are kept.
    """

    def __init__(self, *, echo: bool = False, top: int | None = None) -> None:
        self.echo = echo
        self.top = top
        self.prompt: Ids | None = None
        self.usage: dict[str, Any] = {}
        self.choices: dict[int, Choice] = {}
        self.finished = 0
        #: What changed within the answer though one call has only one of it: its id, model, prompt, or a choice.
        self.changed: str | None = None
        #: An error that stands beside choices, in the answer or in one of them.
        self.error: Any = None
        self._id: str | None = None
        self._model: str | None = None

    def take(self, body: dict[str, Any]) -> None:
        """Reads one chunk, or a whole body. What has no known shape is ignored, and reported as missing at the end."""
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        if (name := body.get("id")) != self._id:
            self._id = self._same("id", self._id, name)
        if (name := body.get("model")) != self._model:
            self._model = self._same("model", self._model, name)
        if "error" in body:
            self.error = self.error or body["error"]
        if (prompt := body.get("prompt_token_ids")) is not None:
            self.take_prompt(Ids.from_json(prompt))
        ext = body.get("sglext")
        ext = ext if isinstance(ext, dict) else None
        if ext is not None:
            self.take_prompt(Ids.from_json(ext.get("input_ids")))
        if isinstance(more := body.get("provider_specific_fields"), dict):
            self.take_prompt(Ids.from_json(more.get("prompt_token_ids")))
        choices = body.get("choices")
        if isinstance(choices, list):
            for position, part in enumerate(choices):
                if isinstance(part, dict):
                    index = part.get("index")
                    self._choice(index if type(index) is int else position).take(part, self)
        outputs = ext.get("output_ids") if ext is not None else None
        if isinstance(outputs, list):
            for index, ids in enumerate(outputs):
                choice = self._choice(index)
                if choice.ids is None:
                    choice.add_ids(ids)

    def check_indexes(self, whole: dict[str, Any]) -> None:
        """Two choices of one index in an answer that came whole are two replies, whose tokens have become one list."""
        choices = objects(whole.get("choices"))
        indexes = [choice.get("index") for choice in choices if type(choice.get("index")) is int]
        if len(set(indexes)) < len(indexes):
            self.changed = self.changed or "choice of one index"

    def take_prompt(self, prompt: Ids | None) -> None:
        """The ids of the one prompt, where they are told at the top of a body; each chunk may repeat them."""
        if prompt is None:
            return
        if self.prompt is None:
            self.prompt = prompt
        elif self.prompt != prompt:
            self.changed = self.changed or "prompt"

    def _same(self, name: str, before: str | None, now: Any) -> str | None:
        """The value that the chunks of one call share; "" and null are absent."""
        if not isinstance(now, str) or not now:
            return before
        if before is not None:
            self.changed = self.changed or name
        return before or now

    def _choice(self, index: int) -> Choice:
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = Choice()
        return choice

    def finish(self, choice: Choice, reason: Any) -> None:
        choice.finish_reason = reason
        self.finished += 1

    def prompt_ids(self) -> Ids | None:
        """The ids of the prompt, from the top of the body or from a choice."""
        if self.prompt is not None:
            return self.prompt
        return next((choice.prompt for choice in self.choices.values() if choice.prompt is not None), None)

    def prompts_differ(self) -> str | None:
        """`prompt` where the choices of a call with one prompt carry the ids of several."""
        prompt = self.prompt_ids()
        for choice in self.choices.values():
            if choice.prompt is not None and choice.prompt != prompt:
                return "prompt"
        return None

    def completions(self, *, several_prompts: bool) -> list[Completion]:
        """The choices in order of their index; each with its own prompt's ids where there are several prompts."""
        shared = self.prompt_ids()
        return [
            self.choices[index].completion(index, shared, several_prompts=several_prompts)
            for index in sorted(self.choices)
        ]


class Choice:
    """What one choice sampled so far: `logprobs` and `tokens` have one entry per sampled token, in order.

    A value that is not a logprob is None in `logprobs`, and `problem` is the code that says why.
    """

    __slots__ = (
        "_cumulative", "_last", "echoed", "entry_ids", "finish_reason", "ids", "last_reason", "logprobs", "malformed",
        "problem", "prompt", "saw_logprobs", "tokens", "top",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ids: list[int] | None = None
        self.entry_ids: list[int] | None = []
        self.prompt: Ids | None = None
        self.logprobs: list[Any] = []
        self.tokens: list[str] = []
        self.top: list[Any] = []
        self.echoed: list[dict[str, Any]] | None = None
        self.saw_logprobs = False
        self.finish_reason: Any = None
        #: The reason of a later chunk: "stop" may be followed by "abort". None where no chunk was parsed with one.
        self.last_reason: Any = None
        self.malformed = False
        self.problem: str | None = None
        #: From which of `logprobs` on the entries of the last chunk are.
        self._last = 0
        #: Whether a chunk repeated the entries of those before it.
        self._cumulative = False

    def take(self, part: dict[str, Any], whole: Sampled) -> None:
        finish = part.get("finish_reason")
        if finish is not None and finish != "":  # some engines write "" before the end
            if self.finish_reason is None:
                whole.finish(self, finish)
            self.last_reason = finish
        if (error := _error_in(part)) is not None:
            whole.error = whole.error or error
        ids: Any = None
        prompt: Any = None
        for place in _places(part):
            if ids is None:
                for key in SAMPLED_IDS:
                    ids = place.get(key)
                    if ids is not None:
                        break
            if prompt is None:
                prompt = place.get("prompt_token_ids")
        if ids is not None:
            self.add_ids(ids)
        if prompt is not None:
            prompt_ids = Ids.from_json(prompt)
            if self.prompt is None:
                self.prompt = prompt_ids
            elif prompt_ids is not None and prompt_ids != self.prompt:
                whole.changed = whole.changed or "prompt"
        logprobs = part.get("logprobs")
        if isinstance(logprobs, dict):
            self._logprobs(logprobs, whole, len(ids) if isinstance(ids, list) else None)

    def one_token(self, token_id: int, logprob: float, token: str) -> None:
        """One more token whose logprob entry has no id: what `take` does with a chunk of one token."""
        if self.ids is None:
            self.ids = []
        self.ids.append(token_id)
        self._last = len(self.logprobs)
        self.logprobs.append(logprob)
        self.tokens.append(token)
        self.saw_logprobs = True
        self.entry_ids = None

    def add_ids(self, ids: Any) -> None:
        """One bad element voids the list: ids are non-negative ints (a bool is not)."""
        if not isinstance(ids, list) or not are_ids(ids):
            self.malformed = True
        elif self.ids is None:
            self.ids = list(ids)
        else:
            self.ids += ids

    def _logprobs(self, logprobs: dict[str, Any], whole: Sampled, new_ids: int | None) -> None:
        """`new_ids`: how many ids came in the same chunk; None where none did."""
        content = logprobs.get("content")
        entries = content if isinstance(content, list) else _legacy(logprobs)
        if entries is None:
            return
        self.saw_logprobs = True
        if whole.echo:
            # vLLM (0.32) puts the prompt's before those of the sampled tokens: told apart when all of them are here.
            self.echoed = self.echoed if self.echoed is not None else []
            self.echoed += [entry if isinstance(entry, dict) else {} for entry in entries]
            return
        entries = self._without_repeated(entries, new_ids)
        for place, entry in enumerate(entries):
            self._entry(entry if isinstance(entry, dict) else {}, whole.top)
            if place == 0 and len(entries) > 1 and not whole.top and self._plain(entries[1:]):
                break

    def _without_repeated(self, entries: list[Any], new_ids: int | None) -> list[Any]:
        """The entries of a chunk without those that earlier chunks had, where each chunk repeats them all.

        With ids in the chunk their number tells. Without (SGLang sends ids at the end) a list of two or more that the
        next one begins with is taken for such.
        """
        before, self._last = self._last, len(self.logprobs)
        known = len(self.logprobs)
        no_token = new_ids == 0 or (new_ids is None and (self._cumulative or bool(self.ids)))
        if no_token and len(entries) == known and self._begins(entries, 0, known):  # the last chunk: only its finish
            self._last = 0
            return []
        if not known or len(entries) <= known - before or len(entries) < 2:
            return entries
        if new_ids is not None:
            repeated = known if len(entries) == known + new_ids and new_ids else 0
        else:
            repeated = known - before if known - before > 1 else 0
        if not repeated or not self._begins(entries, known - repeated, repeated):
            return entries
        if new_ids is None and known > repeated:  # the first two chunks could not be told apart from new entries
            self._forget(known - repeated)
        self._last, self._cumulative = 0, True
        return entries[repeated:]

    def _begins(self, entries: list[Any], start: int, count: int) -> bool:
        """Whether `entries` begin with the `count` entries that are known from `start` on."""
        for known, entry in enumerate(entries[:count], start):
            if not isinstance(entry, dict) or entry.get("logprob") != self.logprobs[known]:
                return False
            if entry.get("token") != self.tokens[known]:
                return False
        return True

    def _forget(self, count: int) -> None:
        """Takes the first `count` entries away."""
        del self.logprobs[:count], self.tokens[:count], self.top[:count]
        if self.entry_ids is not None:
            del self.entry_ids[:count]

    def _plain(self, entries: list[Any]) -> bool:
        """Takes all entries at once where only token and logprob are wanted; False where each has to be examined."""
        if self.entry_ids is not None:
            return False
        try:
            values, tokens = list(map(_LOGPROB, entries)), list(map(_TOKEN, entries))
        except (KeyError, TypeError):
            return False
        if set(map(type, tokens)) != {str} or not are_logprobs(values):
            return False
        self.logprobs += values
        self.tokens += tokens
        return True

    def _entry(self, entry: dict[str, Any], wanted: int | None) -> None:
        value, token = entry.get("logprob"), entry.get("token")
        if is_logprob(value):
            self.logprobs.append(value)
        else:
            self.logprobs.append(None)
            self.problem = self.problem or _no_logprob(value)
        token = token if isinstance(token, str) else ""
        if self.entry_ids is not None:
            token_id = entry.get("token_id")
            if token_id is None:
                token_id = entry.get("id")
            if token_id is None and (spelled := _SPELLED.fullmatch(token)) is not None:
                token_id = int(spelled[1])
            if type(token_id) is int and 0 <= token_id < 2**63:
                self.entry_ids.append(token_id)
            else:
                self.entry_ids = None
        self.tokens.append(token)
        if wanted:
            top = entry.get("top_logprobs")
            self.top.append(
                [
                    {name: alternative.get(name) for name in ("token", "logprob")}
                    for alternative in top[:wanted]
                    if isinstance(alternative, dict)
                ]
                if isinstance(top, list)
                else []
            )

    def completion(self, index: int, shared: Ids | None, *, several_prompts: bool) -> Completion:
        if self.echoed is not None:
            self._settle(self.prompt if several_prompts else shared)
        ids = self.ids
        if ids is None and not self.malformed and self.saw_logprobs and self.entry_ids:
            ids = self.entry_ids
        return Completion(
            index=index,
            token_ids=None if ids is None else Ids.of(ids),
            tokens=self.tokens if self.saw_logprobs else None,
            logprobs=self.logprobs if self.saw_logprobs else ([] if ids == [] else None),
            top_logprobs=self.top or None,
            prompt_token_ids=self.prompt if several_prompts else None,
        )

    def _settle(self, prompt: Ids | None) -> None:
        """Takes the sampled tokens' entries, which follow the prompt's, where the counts tell which are which.

        With `max_tokens: 0` vLLM (0.32) samples a token and sends the prompt's logprobs alone: nothing is taken then,
        all entries stay, and their number says that they do not belong to the ids.
        """
        entries, self.echoed = self.echoed or [], None
        sampled = len(self.ids or ())
        if prompt is not None and len(entries) == len(prompt) + sampled:
            entries = entries[len(prompt) :]
        else:
            self.problem = "echo_logprobs_not_told_apart"
        for entry in entries:
            self._entry(entry, None)


def prompts_cut(body: dict[str, Any]) -> int:
    """How many of the places where `Sampled` looks for a prompt's ids have `false` instead."""
    ext, more, choices = body.get("sglext"), body.get("provider_specific_fields"), body.get("choices")
    count = 1 if body.get("prompt_token_ids") is False else 0
    if isinstance(ext, dict) and ext.get("input_ids") is False:
        count += 1
    if isinstance(more, dict) and more.get("prompt_token_ids") is False:
        count += 1
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            for place in _places(choice):
                if place.get("prompt_token_ids") is False:
                    count += 1
    return count


def _places(part: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    if NESTED.isdisjoint(part):
        return (part,)
    return (part, *(place for name in _NESTED_ORDER if isinstance(place := part.get(name), dict)))


_NESTED_ORDER: Final = ("provider_specific_fields", "raw_output", "message")


def _error_in(part: dict[str, Any]) -> Any:
    """The error in a choice, or in its delta or message; None where there is none."""
    error = part.get("error")
    if not error and isinstance(delta := part.get("delta"), dict):
        error = delta.get("error")
    if not error and isinstance(message := part.get("message"), dict):
        error = message.get("error")
    return error or None


def _legacy(logprobs: dict[str, Any]) -> list[Any] | None:
    """Entries of the completions route's `{tokens, token_logprobs, top_logprobs}`."""
    values = logprobs.get("token_logprobs")
    return list(_legacy_entries(logprobs, values)) if isinstance(values, list) else None


def _legacy_entries(logprobs: dict[str, Any], values: list[Any]) -> Iterator[dict[str, Any]]:
    tokens, top = logprobs.get("tokens"), logprobs.get("top_logprobs")
    for place, value in enumerate(values):
        token = tokens[place] if isinstance(tokens, list) and place < len(tokens) else ""
        entry: dict[str, Any] = {"token": token, "logprob": value}
        if isinstance(top, list) and place < len(top) and isinstance(top[place], dict):
            entry["top_logprobs"] = [{"token": name, "logprob": p} for name, p in top[place].items()]
        yield entry


def _no_logprob(value: Any) -> str:
    """The code for a value that is not a logprob."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "logprob_missing_for_token"
    if value <= CLAMPED:
        return "logprob_clamped"
    return "logits_not_logprobs" if ROUNDING < value <= LARGEST else "logprob_not_finite"
