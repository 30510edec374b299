"""llama.cpp's server: ids stand in the logprob entries of unstreamed answers; the prompt's come from two side routes.

As seen on the server inside xllamacpp 2026.10: a stream lacks the stop token's entry and refuses logprobs beside
tools, so an agent that streams is answered from an unstreamed call. With a stop string the last token is missing, and a
character of several tokens (an emoji) comes as one entry with the last one's id: the call is not complete, and says so.
Prompt ids are taken by its completion route alone: token-in stays off here.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, Final

from capture.engines.answer.choices import Choice
from capture.engines.base import CHAT, CaptureOptions, Engine, Question, Reader, ResponseFilter, UpstreamRequest
from capture.engines.vllm import chat_logprobs
from capture.record import Ids
from capture.unavailable import why


class LlamaCpp(Engine):
    name: ClassVar[str] = "llamacpp"
    repeats_prefill: ClassVar[bool] = True

    def ask(self, wire: str, body: dict[str, Any], wants: CaptureOptions) -> UpstreamRequest:
        ask = UpstreamRequest(dict(body))
        streams = body.get("stream") is True
        ask.unstreamed = streams and (wants.capture or wants.buffered)
        if ask.unstreamed:
            ask.body["stream"] = False
            ask.body.pop("stream_options", None)
        if not wants.capture:
            return ask
        if wire == CHAT:
            # `top_logprobs: 0` gives no entries at all; `logprobs` alone gives twenty alternatives an entry.
            injected = chat_logprobs(ask, wants, at_least=1)
        else:
            injected = []
            asked = body.get("logprobs")
            if not asked:
                ask.body["logprobs"] = max(1, wants.top_logprobs or 1)
                injected.append("logprobs")
            ask.requested.update(logprobs=True, top_logprobs=wants.top_logprobs)
        ask.requested["token_ids"] = True
        ask.injected = tuple(injected)
        return ask

    def sampled_count(self, reader: Reader) -> int | None:
        """The usage counts the first choice of n alone; the others are compared with nothing.

        Of one that may lack a token (see above) nothing would say so.
        """
        told = super().sampled_count(reader)
        others = [one for index, one in reader.sampled.choices.items() if index != 0]
        if any(_may_lack(one, reader.request) for one in others):
            return None
        return None if told is None else told + sum(len(one.entry_ids or one.ids or ()) for one in others)

    def count_missing(self, reader: Reader) -> str:
        return "choice_not_counted" if super().sampled_count(reader) is not None else super().count_missing(reader)

    def ids_missing(self, reader: Reader) -> str:
        return "stop_token_not_returned" if reader.request.get("stop") else super().ids_missing(reader)

    def ids_lost(self, reader: Reader, sampled: int, told: int) -> str:
        if sampled == told - 1 and reader.request.get("stop"):
            return "stop_token_not_returned"
        if sampled < told and any(_spells(one) for one in reader.sampled.choices.values()):
            return "character_ids_not_returned"
        return super().ids_lost(reader, sampled, told)

    def hidden(self, wire: str, body: dict[str, Any]) -> ResponseFilter:
        """`logprobs: 0` (completions) and `top_logprobs: 0` (chat) give no logprobs."""
        hide = super().hidden(wire, body)
        none = body.get("top_logprobs") == 0 if wire == CHAT else not body.get("logprobs")
        # A completion that nobody asked logprobs of carries null; a chat's choice has no such key.
        nulls = frozenset() if wire == CHAT else frozenset(("logprobs",))
        return hide._replace(logprobs=hide.logprobs or none, nulls=nulls)

    def questions(self, reader: Reader) -> Generator[Question, Any, None] | None:
        """The prompt's ids: `/apply-template` renders the messages, `/tokenize` gives the ids that the server uses."""
        if reader.sampled.prompt is not None or not reader.ask.requested["token_ids"] or reader.several_prompts:
            return None
        return _prompt_ids(reader)

    def count_prompt(self, body: dict[str, Any]) -> Generator[Question, Any, int | None]:
        return _counted(body)

    def matched_stop(self, reader: Reader) -> str | None:
        """The answer does not say it; but the token that ends a stop string is the only one without an entry."""
        stops, choice = reader.request.get("stop"), reader.sampled.choices.get(0)
        if not stops or choice is None or choice.finish_reason != "stop" or not choice.tokens or _spells(choice):
            return None
        if reader.told("completion_tokens") != len(choice.tokens) + 1:
            return None
        stops = [stops] if isinstance(stops, str) else stops
        return str(stops[0]) if len(stops) == 1 else ""


def _may_lack(choice: Choice, request: dict[str, Any]) -> bool:
    """Whether a choice that nobody counted may lack a token: of a stop string, of a character, of one cut in half."""
    ended = choice.finish_reason
    most = request.get("max_completion_tokens") or request.get("max_tokens")
    cut = ended == "length" and most != len(choice.tokens)
    return cut or (ended == "stop" and bool(request.get("stop"))) or _spells(choice)


def _spells(choice: Choice) -> bool:
    """Whether it holds a character that may be several tokens."""
    return not all(token.isascii() for token in choice.tokens)


#: What of a chat request shapes the prompt.
_TEMPLATE_FIELDS: Final = (
    "messages", "tools", "tool_choice", "chat_template_kwargs", "parallel_tool_calls", "response_format", "json_schema",
    "grammar", "reasoning_format", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


def _rendered(body: dict[str, Any]) -> Question:
    return "/apply-template", {name: body[name] for name in _TEMPLATE_FIELDS if body.get(name) is not None}


def _tokenized(text: str) -> Question:
    return "/tokenize", {"content": text, "add_special": True, "parse_special": True}


def _counted(body: dict[str, Any]) -> Generator[Question, Any, int | None]:
    if _has_media(body.get("messages")):
        return None
    rendered = yield _rendered(body)
    text = rendered.get("prompt") if isinstance(rendered, dict) else None
    if not isinstance(text, str):
        return None
    answer = yield _tokenized(text)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    return len(tokens) if isinstance(tokens, list) else None


def _prompt_ids(reader: Reader) -> Generator[Question, Any, None]:
    body = reader.request
    if reader.wire == CHAT:
        if _has_media(body.get("messages")):
            reader.ask.unavailable["prompt_token_ids"] = why("prompt_has_media")
            return
        rendered = yield _rendered(body)
        text = rendered.get("prompt") if isinstance(rendered, dict) else None
    else:
        text = body.get("prompt")
        if isinstance(text, list):
            reader.sampled.prompt = Ids.from_json(text)
            return
    if not isinstance(text, str):
        reader.ask.unavailable["prompt_token_ids"] = why("prompt_route_missing")
        return
    answer = yield _tokenized(text)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    reader.sampled.prompt = Ids.from_json(tokens)
    if reader.sampled.prompt is None:
        reader.ask.unavailable["prompt_token_ids"] = why("prompt_route_missing")


def _has_media(messages: Any) -> bool:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") not in (None, "text"):
                return True
    return False
