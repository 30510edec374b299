"""An engine, as the proxy knows it: what to ask for besides what the agent asked, and how to read the answer.

An engine's own file says what differs: what to ask for, what an answer looks like when nobody asked, what it counts.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from capture import json
from capture.engines.answer.reader import CHAT, COMPLETIONS, Reader
from capture.engines.answer.strip import ResponseFilter
from capture.record import FIELDS, Ids, Unavailable
from capture.unavailable import why

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "WIRES",
    "CaptureOptions",
    "Engine",
    "Question",
    "Reader",
    "ResponseFilter",
    "UpstreamRequest",
]

WIRES: Final = (CHAT, COMPLETIONS)

Question = tuple[str, dict[str, Any]]


class CaptureOptions(NamedTuple):
    """What is wanted of a call besides what the agent asked for."""

    capture: bool = True
    top_logprobs: int | None = None
    buffered: bool = False


@dataclass(slots=True)
class UpstreamRequest:
    """A call as it goes to the engine.

    `unstreamed`: the agent asked for a stream, but the engine has to be called without one; the answer is streamed to
    the agent from what came whole. `injected` names what was added, to recognise a refusal that names one of them.
    `requested` is what is really asked of the engine, by whomever: `{logprobs, top_logprobs, token_ids}`.
    """

    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    unstreamed: bool = False
    injected: tuple[str, ...] = ()
    requested: dict[str, Any] = field(
        default_factory=lambda: {"logprobs": False, "top_logprobs": None, "token_ids": False}
    )
    unavailable: dict[str, Unavailable] = field(default_factory=dict)


class Engine:
    """What an engine's file may change. This one asks for nothing: the engine `other`."""

    name: ClassVar[str] = "other"
    #: Keys that an answer nobody asked anything of carries with null: they are set to null, not taken away.
    null_when_unasked: ClassVar[frozenset[str]] = frozenset()
    #: Keys of a stream's last chunk, which is the count's where one is asked for and the finish's where none is.
    on_last_chunk: ClassVar[tuple[str, ...]] = ()
    #: Whether the logprobs of a completions call with `echo` begin with the prompt's.
    echoes_logprobs: ClassVar[bool] = False
    #: Whether its chat route takes a prompt's ids in place of messages, and it renders and decodes when asked.
    takes_prompt_ids: ClassVar[bool] = False
    #: Whether the answer to a chat that ends with the assistant's own words begins with them.
    repeats_prefill: ClassVar[bool] = False

    def ask(self, wire: str, body: dict[str, Any], wants: CaptureOptions) -> UpstreamRequest:
        """The call to make for an agent's `body` (which is not changed)."""
        return UpstreamRequest(dict(body), unavailable=dict.fromkeys(FIELDS, why("engine_unsupported")))

    def refused(self, ask: UpstreamRequest, status: int, error: object) -> bool:
        """Whether a 4xx answer is about something that we added: its text names one of the fields."""
        text = json.dumps(error).decode().lower() if error is not None else ""
        return any(name.lower() in text for name in ask.injected)

    def reader(self, wire: str, body: dict[str, Any], ask: UpstreamRequest) -> Reader:
        return Reader(self, wire, body, ask)

    def questions(self, reader: Reader) -> Generator[Question, Any, None] | None:
        """Further requests, `(path, body)`, whose JSON answers are sent back in; None where the answer says it all."""
        return None

    def count_prompt(self, body: dict[str, Any]) -> Generator[Question, Any, int | None] | None:
        """Requests that tell how many tokens a chat request's prompt has; None where the engine has no such route."""
        return self._counted(body) if self.takes_prompt_ids else None

    def _counted(self, body: dict[str, Any]) -> Generator[Question, Any, int | None]:
        path, asked = self.render(body, body["messages"], to_be_answered=not body.get("continue_final_message"))
        if body.get("continue_final_message"):
            asked["continue_final_message"] = True
        ids = self.rendered((yield path, asked))
        return None if ids is None else len(ids)

    def matched_stop(self, reader: Reader) -> str | None:
        """The stop string that ended the answer, where the engine does not say it in the answer itself; "" for one of
        several."""
        return None

    # token-in

    def render(self, body: dict[str, Any], messages: list[Any], *, to_be_answered: bool) -> Question:
        """How to have `messages`, under the other fields of a chat request's `body`, rendered by the engine's template:
        as a prompt that is `to_be_answered`, or as they stand. Only where `takes_prompt_ids`, as all that follows.
        """
        raise NotImplementedError

    def read(self, ids: Ids) -> Question:
        """How to have ids decoded, special tokens written out."""
        raise NotImplementedError

    def rendered(self, answer: Any) -> Ids | None:
        """The ids in an answer to `render`; None where it is none."""
        return Ids.from_json(answer.get("tokens")) if isinstance(answer, dict) else None

    def said(self, answer: Any) -> str | None:
        """The text in an answer to `read`; None where it is none."""
        return None

    def put_prompt(self, body: dict[str, Any], prompt: Ids) -> None:
        """Sets into a chat request's body what makes the engine use `prompt` in place of the rendered messages."""
        raise NotImplementedError

    def brings_prompt(self, body: dict[str, Any]) -> bool:
        """Whether the agent itself sends such a field."""
        return False

    def ended(self, choice: dict[str, Any], body: dict[str, Any]) -> str:
        """How a choice of a finished chat call ended: by a `stop_token`, the last id; by a `stop_string`; it was `cut`,
        so that nothing it holds is unseen by the agent; or `unknown`.
        """
        return "unknown"

    # what the agent sees

    def hidden(self, wire: str, body: dict[str, Any]) -> ResponseFilter:
        """What of an answer the agent did not ask for."""
        logprobs = body.get("logprobs")
        options = body.get("stream_options")
        every = bool(body.get("return_token_ids"))
        return ResponseFilter(
            logprobs=not flag(logprobs) if wire == CHAT else logprobs is None or logprobs is False,
            prompt=not every,
            sampled=not every,
            usage=not (isinstance(options, dict) and options.get("include_usage")),
            nulls=self.null_when_unasked,
        )

    def step_is_ours(self, hide: ResponseFilter) -> bool:
        """Whether a streamed step without anything to see was sent only because we asked.

        vLLM sends one where ids are asked for, not for logprobs alone (0.32, `chat_completion/serving.py`).
        """
        return hide.sampled

    # what the engine counts

    def sampled_count(self, reader: Reader) -> int | None:
        """How many sampled tokens the engine says there are, over all choices; None when it does not say."""
        return reader.told("completion_tokens")

    def prompt_count(self, reader: Reader) -> int | None:
        """How many prompt tokens the engine says there are, over all prompts; None when it does not say."""
        return reader.told("prompt_tokens")

    # codes for what this engine is known to lose

    def ids_missing(self, reader: Reader) -> str:
        """For a call of which some choice has no ids at all."""
        return "server_ignored_return_token_ids"

    def count_missing(self, reader: Reader) -> str:
        """For a call of which the engine does not say how many tokens it sampled."""
        return "usage_not_returned"

    def ids_lost(self, reader: Reader, sampled: int, told: int) -> str:
        """For a call whose ids are not as many as the engine counted."""
        return "count_mismatch_usage"

    def logprobs_lost(self, reader: Reader, sampled: int, held: int) -> str:
        """For a call whose logprobs are not as many as its ids."""
        return "count_mismatch_ids_logprobs"

    def ids_lost_by_cut(self, reader: Reader) -> str:
        """For a stream that the agent left before its ids came."""
        return "stream_aborted"


def how_it_ended(choice: dict[str, Any], told: str, body: dict[str, Any], *, keeps_stop: bool) -> str:
    """`Engine.ended`, where the key `told` of a choice names the stop string, or the stop token's id, that ended it."""
    finish, by = choice.get("finish_reason"), choice.get(told)
    if finish == "length":
        return "cut"
    if finish not in ("stop", "tool_calls", "function_call"):
        return "unknown"
    if isinstance(by, str) or (by is None and told not in choice and body.get("stop")):
        return "cut" if keeps_stop else "stop_string"
    return "stop_token"


def flag(value: Any) -> bool:
    """A field that is true or not, as engines read it: pydantic also takes 1, "true", "on" and the like for true."""
    if isinstance(value, str):
        return value.lower() in ("1", "true", "t", "yes", "y", "on")
    return value is True or value == 1
