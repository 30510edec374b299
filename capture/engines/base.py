"""An engine as the proxy knows it: what to ask for besides what the agent asked, and how to read the answer.

A new engine is one file with a subclass of `Engine` and its entry in `capture.engines.ENGINES`. The subclass says only
what differs: how it is recognized, what to ask for, what an answer looks like when nobody asked, what it counts.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from capture import json
from capture.engines.answer.answer import Answer
from capture.engines.answer.strip import ResponseFilter
from capture.engines.meaning import NOTHING, LogprobMeaning
from capture.engines.request import CaptureOptions, FollowUp, UpstreamRequest
from capture.engines.wires import CHAT
from capture.record import FIELDS, Ids
from capture.unavailable import why


class Engine:
    """What an engine's file may change. This one asks for nothing: the engine `other`, any OpenAI-compatible API."""

    #: As in `--engine`, in `-m NAME/MODEL`, in records, and in `owned_by` of its `/v1/models`.
    name: ClassVar[str] = "other"
    #: Routes (GET) that tell this engine from others; asked until `recognize` can say.
    identity_routes: ClassVar[tuple[str, ...]] = ()
    #: Whether its errors are `{"object": "error", "message", ...}` rather than nested under `error`.
    flat_errors: ClassVar[bool] = False
    #: What constrains sampling where a request offers tools, in words; None where nothing does.
    tool_grammar: ClassVar[str | None] = None
    #: What its logprobs mean as it is started by default; what `measure` finds out takes precedence.
    logprobs: ClassVar[LogprobMeaning] = NOTHING
    #: Keys that an answer nobody asked anything of carries with null: they are set to null, not taken away.
    null_when_unasked: ClassVar[frozenset[str]] = frozenset()
    #: Keys of a stream's last chunk, which is the count's where one is asked for and the finish's where none is.
    on_last_chunk: ClassVar[tuple[str, ...]] = ()
    #: Whether the logprobs of a completions call with `echo` begin with the prompt's.
    echoes_logprobs: ClassVar[bool] = False
    #: Whether its chat route takes a prompt's ids in place of messages, and it renders and detokenizes when asked.
    takes_prompt_ids: ClassVar[bool] = False
    #: Whether the answer to a chat that ends with the assistant's own words begins with them.
    repeats_prefill: ClassVar[bool] = False

    # which engine it is

    @classmethod
    def recognize(cls, answers: Mapping[str, Any]) -> tuple[str, str | None] | None:
        """`(name, version)` where the JSON of its `identity_routes`, by path, is this engine's; None where it is not,
        or where more of the routes have to be asked.
        """
        return None

    @classmethod
    def sampling_defaults(cls, answers: Mapping[str, Any]) -> dict[str, Any] | None:
        """What it samples with where a call sets nothing, from the same answers; None where it does not say.

        vLLM 0.32 and SGLang 0.5.23 take theirs from the model's generation_config.json and do not tell.
        """
        return None

    # the call

    def ask(self, wire: str, body: dict[str, Any], options: CaptureOptions) -> UpstreamRequest:
        """The call to make for an agent's `body` (which is not changed)."""
        return UpstreamRequest(dict(body), unavailable=dict.fromkeys(FIELDS, why("engine_unsupported")))

    def refused(self, upstream: UpstreamRequest, status: int, error: object) -> bool:
        """Whether a 4xx answer is about something that we added: its text names one of the fields."""
        text = json.dumps(error).decode().lower() if error is not None else ""
        return any(name.lower() in text for name in upstream.injected)

    def follow_ups(self, answer: Answer) -> Generator[FollowUp, Any, None] | None:
        """Further requests whose JSON answers are sent back in; None where the answer has everything."""
        return None

    def count_prompt(self, body: dict[str, Any]) -> Generator[FollowUp, Any, int | None] | None:
        """Requests that count the tokens of a chat request's prompt; None where the engine has no such route."""
        return self._counted(body) if self.takes_prompt_ids else None

    def _counted(self, body: dict[str, Any]) -> Generator[FollowUp, Any, int | None]:
        path, asked = self.render(body, body["messages"], to_be_answered=not body.get("continue_final_message"))
        if body.get("continue_final_message"):
            asked["continue_final_message"] = True
        ids = self.parse_rendered((yield path, asked))
        return None if ids is None else len(ids)

    def weight_versions(self, answer: dict[str, Any]) -> list[Any] | None:
        """Per choice of a whole answer, `[{"version", "start", "end"}, ...]`: which weights sampled which of its ids.
        None where the engine does not say.
        """
        return None

    def matched_stop(self, answer: Answer) -> str | None:
        """The stop string that ended the answer, where the answer itself does not have it; "" for one of several."""
        return None

    # token-in

    def render(self, body: dict[str, Any], messages: list[Any], *, to_be_answered: bool) -> FollowUp:
        """How to have `messages`, under the other fields of a chat request's `body`, rendered by the engine's template:
        as a prompt that is `to_be_answered`, or as they are. Only where `takes_prompt_ids`, as all that follows.
        """
        raise NotImplementedError

    def detokenize(self, ids: Ids) -> FollowUp:
        """How to have ids decoded, special tokens written out."""
        raise NotImplementedError

    def parse_rendered(self, answer: Any) -> Ids | None:
        """The ids in an answer to `render`; None where there are none."""
        return Ids.from_json(answer.get("tokens")) if isinstance(answer, dict) else None

    def parse_detokenized(self, answer: Any) -> str | None:
        """The text in an answer to `detokenize`; None where there is none."""
        return None

    def set_prompt_ids(self, body: dict[str, Any], prompt: Ids) -> None:
        """Sets into a chat request's body what makes the engine use `prompt` in place of the rendered messages."""
        raise NotImplementedError

    def has_prompt_ids(self, body: dict[str, Any]) -> bool:
        """Whether the agent itself sends such a field."""
        return False

    def reply_end(self, choice: dict[str, Any], body: dict[str, Any]) -> str:
        """How a choice of a finished chat call ended: by a `stop_token`, the last id; by a `stop_string`; it was `cut`,
        so the agent saw all that it holds; or `unknown`.
        """
        return "unknown"

    # what the agent sees

    def response_filter(self, wire: str, body: dict[str, Any]) -> ResponseFilter:
        """What of an answer the agent did not ask for."""
        logprobs = body.get("logprobs")
        options = body.get("stream_options")
        every = bool(body.get("return_token_ids"))
        return ResponseFilter(
            logprobs=not is_true(logprobs) if wire == CHAT else logprobs is None or logprobs is False,
            prompt=not every,
            sampled=not every,
            usage=not (isinstance(options, dict) and options.get("include_usage")),
            nulls=self.null_when_unasked,
        )

    def empty_steps_are_ours(self, hide: ResponseFilter) -> bool:
        """Whether a streamed step without anything to see was sent only because of what we added.

        vLLM sends one where ids are asked for, not for logprobs alone (0.32, `chat_completion/serving.py`).
        """
        return hide.sampled

    # what the engine counts

    def sampled_count(self, answer: Answer) -> int | None:
        """How many sampled tokens the engine counts, over all choices; None where it does not say."""
        return answer.usage_count("completion_tokens")

    def prompt_count(self, answer: Answer) -> int | None:
        """How many prompt tokens the engine counts, over all prompts; None where it does not say."""
        return answer.usage_count("prompt_tokens")

    # codes (of `capture.unavailable`) for what this engine is known to lose

    def ids_missing(self, answer: Answer) -> str:
        """For a call of which some choice has no ids at all."""
        return "server_ignored_return_token_ids"

    def count_missing(self, answer: Answer) -> str:
        """For a call of which the engine does not say how many tokens it sampled."""
        return "usage_not_returned"

    def ids_lost(self, answer: Answer, sampled: int, counted: int) -> str:
        """For a call with `sampled` ids of which the engine counted `counted`."""
        return "count_mismatch_usage"

    def logprobs_lost(self, answer: Answer, sampled: int, logprobs: int) -> str:
        """For a call with `sampled` ids and another number of `logprobs`."""
        return "count_mismatch_ids_logprobs"

    def ids_lost_by_cut(self, answer: Answer) -> str:
        """For a stream that the agent left before its ids came."""
        return "stream_aborted"


def reply_end(choice: dict[str, Any], stop_key: str, body: dict[str, Any], *, keeps_stop: bool) -> str:
    """`Engine.reply_end`, where the key `stop_key` of a choice has the stop string or the stop token's id."""
    finish, by = choice.get("finish_reason"), choice.get(stop_key)
    if finish == "length":
        return "cut"
    if finish not in ("stop", "tool_calls", "function_call"):
        return "unknown"
    if isinstance(by, str) or (by is None and stop_key not in choice and body.get("stop")):
        return "cut" if keeps_stop else "stop_string"
    return "stop_token"


def is_true(value: Any) -> bool:
    """A field that is true or not, as engines read it: pydantic also takes 1, "true", "on" and the like for true."""
    if isinstance(value, str):
        return value.lower() in ("1", "true", "t", "yes", "y", "on")
    return value is True or value == 1
