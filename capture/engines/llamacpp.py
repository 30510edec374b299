"""llama.cpp's server: ids are in the logprob entries of unstreamed answers; the prompt's come from two side routes.

Checked on the server inside xllamacpp 2026.10: a stream lacks the stop token's entry and refuses logprobs beside
tools, so a streaming agent is answered from an unstreamed call. With a stop string the last token is missing, and a
character of several tokens (an emoji) comes as one entry with the last one's id: the call is not complete, and says so.
Prompt ids are taken by its completion route alone: token-in stays off here.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, ClassVar, Final

from capture.engines.answer.answer import Answer
from capture.engines.answer.choices import Choice
from capture.engines.answer.strip import ResponseFilter
from capture.engines.base import Engine
from capture.engines.inject import chat_logprobs, unstream
from capture.engines.meaning import ENGINE_DEFAULT, LOGPROBS, NOT_APPLIED, LogprobMeaning
from capture.engines.request import CaptureOptions, FollowUp, UpstreamRequest
from capture.engines.wires import CHAT
from capture.record import Ids
from capture.unavailable import why


class LlamaCpp(Engine):
    name: ClassVar[str] = "llamacpp"
    identity_routes: ClassVar[tuple[str, ...]] = ("/props",)
    tool_grammar: ClassVar[str | None] = "llama.cpp's tool grammar"
    repeats_prefill: ClassVar[bool] = True
    #: Of the model's logits, before every sampler and its tool grammar, unless a request has `post_sampling_probs`.
    #: Measured on the server inside xllamacpp 2026.10.
    logprobs: ClassVar[LogprobMeaning] = LogprobMeaning(NOT_APPLIED, NOT_APPLIED, LOGPROBS, ENGINE_DEFAULT)

    @classmethod
    def recognize(cls, answers: Mapping[str, Any]) -> tuple[str, str | None] | None:
        props = answers.get("/props")
        if not isinstance(props, dict) or not ("default_generation_settings" in props or "build_info" in props):
            return None
        build = props.get("build_info")
        return cls.name, build if isinstance(build, str) else None

    @classmethod
    def sampling_defaults(cls, answers: Mapping[str, Any]) -> dict[str, Any] | None:
        """Its defaults, which are not neutral: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05."""
        props = answers.get("/props")
        settings = props.get("default_generation_settings") if isinstance(props, dict) else None
        params = settings.get("params", settings) if isinstance(settings, dict) else None
        return {name: params[name] for name in _SAMPLING if name in params} if isinstance(params, dict) else None

    def ask(self, wire: str, body: dict[str, Any], options: CaptureOptions) -> UpstreamRequest:
        upstream = UpstreamRequest(dict(body))
        streams = body.get("stream") is True
        upstream.unstreamed = streams and (options.capture or options.buffered)
        if upstream.unstreamed:
            unstream(upstream)
        if not options.capture:
            return upstream
        if wire == CHAT:
            # `top_logprobs: 0` gives no entries at all; `logprobs` alone gives twenty alternatives per entry.
            injected = chat_logprobs(upstream, options, at_least=1)
        else:
            injected = []
            asked = body.get("logprobs")
            if not asked:
                upstream.body["logprobs"] = max(1, options.top_logprobs or 1)
                injected.append("logprobs")
            upstream.requested.update(logprobs=True, top_logprobs=options.top_logprobs)
        upstream.requested["token_ids"] = True
        upstream.injected = tuple(injected)
        return upstream

    def sampled_count(self, answer: Answer) -> int | None:
        """The usage counts the first choice of n alone. The others are taken as they are, unless one may lack a token
        (see above), which nothing would show.
        """
        first = super().sampled_count(answer)
        others = [choice for index, choice in answer.sampled.choices.items() if index != 0]
        if any(_may_lack(choice, answer.request) for choice in others):
            return None
        return None if first is None else first + sum(len(choice.entry_ids or choice.ids or ()) for choice in others)

    def count_missing(self, answer: Answer) -> str:
        return "choice_not_counted" if super().sampled_count(answer) is not None else super().count_missing(answer)

    def ids_missing(self, answer: Answer) -> str:
        return "stop_token_not_returned" if answer.request.get("stop") else super().ids_missing(answer)

    def ids_lost(self, answer: Answer, sampled: int, counted: int) -> str:
        if sampled == counted - 1 and answer.request.get("stop"):
            return "stop_token_not_returned"
        if sampled < counted and any(_spells(choice) for choice in answer.sampled.choices.values()):
            return "character_ids_not_returned"
        return super().ids_lost(answer, sampled, counted)

    def response_filter(self, wire: str, body: dict[str, Any]) -> ResponseFilter:
        """`logprobs: 0` (completions) and `top_logprobs: 0` (chat) give no logprobs."""
        hide = super().response_filter(wire, body)
        none = body.get("top_logprobs") == 0 if wire == CHAT else not body.get("logprobs")
        # A completion that nobody asked logprobs of carries null; a chat's choice has no such key.
        nulls = frozenset() if wire == CHAT else frozenset(("logprobs",))
        return hide._replace(logprobs=hide.logprobs or none, nulls=nulls)

    def follow_ups(self, answer: Answer) -> Generator[FollowUp, Any, None] | None:
        """The prompt's ids: `/apply-template` renders the messages, `/tokenize` gives the ids that the server uses."""
        if answer.sampled.prompt is not None or not answer.upstream.requested["token_ids"] or answer.several_prompts:
            return None
        return _prompt_ids(answer)

    def count_prompt(self, body: dict[str, Any]) -> Generator[FollowUp, Any, int | None]:
        return _counted(body)

    def matched_stop(self, answer: Answer) -> str | None:
        """The answer does not have it, but the token that completes a stop string is the only one without an entry."""
        stops, choice = answer.request.get("stop"), answer.sampled.choices.get(0)
        if not stops or choice is None or choice.finish_reason != "stop" or not choice.tokens or _spells(choice):
            return None
        if answer.usage_count("completion_tokens") != len(choice.tokens) + 1:
            return None
        stops = [stops] if isinstance(stops, str) else stops
        return str(stops[0]) if len(stops) == 1 else ""


def _may_lack(choice: Choice, request: dict[str, Any]) -> bool:
    """Whether a choice without a count may lack a token: of a stop string, or of a character, whole or cut."""
    ended = choice.finish_reason
    most = request.get("max_completion_tokens") or request.get("max_tokens")
    cut = ended == "length" and most != len(choice.tokens)
    return cut or (ended == "stop" and bool(request.get("stop"))) or _spells(choice)


def _spells(choice: Choice) -> bool:
    """Whether it holds a character that may be several tokens."""
    return not all(token.isascii() for token in choice.tokens)


_SAMPLING: Final = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "dynatemp_range", "mirostat", "xtc_probability", "dry_multiplier", "samplers",
)  # fmt: skip
#: What of a chat request shapes the prompt.
_TEMPLATE_FIELDS: Final = (
    "messages", "tools", "tool_choice", "chat_template_kwargs", "parallel_tool_calls", "response_format", "json_schema",
    "grammar", "reasoning_format", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


def _rendered(body: dict[str, Any]) -> FollowUp:
    return "/apply-template", {name: body[name] for name in _TEMPLATE_FIELDS if body.get(name) is not None}


def _tokenized(text: str) -> FollowUp:
    return "/tokenize", {"content": text, "add_special": True, "parse_special": True}


def _counted(body: dict[str, Any]) -> Generator[FollowUp, Any, int | None]:
    if _has_media(body.get("messages")):
        return None
    rendered = yield _rendered(body)
    text = rendered.get("prompt") if isinstance(rendered, dict) else None
    if not isinstance(text, str):
        return None
    answer = yield _tokenized(text)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return len(tokens) if isinstance(tokens, list) else None


def _prompt_ids(answer: Answer) -> Generator[FollowUp, Any, None]:
    body = answer.request
    if answer.wire == CHAT:
        if _has_media(body.get("messages")):
            answer.upstream.unavailable["prompt_token_ids"] = why("prompt_has_media")
            return
        rendered = yield _rendered(body)
        text = rendered.get("prompt") if isinstance(rendered, dict) else None
    else:
        text = body.get("prompt")
        if isinstance(text, list):
            answer.sampled.prompt = Ids.from_json(text)
            return
    if not isinstance(text, str):
        answer.upstream.unavailable["prompt_token_ids"] = why("prompt_route_missing")
        return
    tokenized = yield _tokenized(text)
    tokens = tokenized.get("tokens") if isinstance(tokenized, dict) else None
    answer.sampled.prompt = Ids.from_json(tokens)
    if answer.sampled.prompt is None:
        answer.upstream.unavailable["prompt_token_ids"] = why("prompt_route_missing")


def _has_media(messages: Any) -> bool:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") not in (None, "text"):
                return True
    return False
