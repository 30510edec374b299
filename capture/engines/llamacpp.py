"""llama.cpp's server: ids stand in the logprob entries of unstreamed answers; the prompt's come from two side routes.

As seen on the server inside xllamacpp 2026.10: a stream lacks the stop token's entry and refuses logprobs beside
tools, so an agent that streams is answered from an unstreamed call. With a stop string the last token is missing: the
call is not complete, and says so.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, Final

from capture.codes import why
from capture.engines.base import CHAT, Ask, Engine, Question, Reader, Wants
from capture.engines.vllm import chat_logprobs
from capture.record import Ids, Unavailable


class LlamaCpp(Engine):
    name: ClassVar[str] = "llamacpp"
    null_when_unasked: ClassVar[frozenset[str]] = frozenset()

    def ask(self, wire: str, body: dict[str, Any], wants: Wants) -> Ask:
        ask = Ask(dict(body))
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

    def reader(self, wire: str, body: dict[str, Any], ask: Ask) -> Reader:
        return _Reader(self, wire, body, ask)

    def sampled_count(self, reader: Reader) -> int | None:
        """The usage counts one choice of n; with several it is compared for the first alone."""
        told = super().sampled_count(reader)
        if told is None or len(reader.choices) <= 1:
            return told
        others = [one for index, one in reader.choices.items() if index != 0]
        return told + sum(len(one.entry_ids or one.ids or ()) for one in others)

    def questions(self, reader: Reader) -> Generator[Question, Any, None] | None:
        """The prompt's ids: `/apply-template` renders the messages, `/tokenize` gives the ids that the server uses."""
        if reader.prompt is not None or not reader.ask.injected:
            return None
        return _prompt_ids(reader)


#: What of a chat request shapes the prompt.
_TEMPLATE_FIELDS: Final = (
    "messages", "tools", "tool_choice", "chat_template_kwargs", "parallel_tool_calls", "response_format", "json_schema",
    "grammar", "reasoning_format", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


def _prompt_ids(reader: Reader) -> Generator[Question, Any, None]:
    body = reader.request
    if reader.wire == CHAT:
        if _has_media(body.get("messages")):
            reader.ask.unavailable["prompt_token_ids"] = why("prompt_has_media")
            return
        rendered = yield (
            "/apply-template",
            {name: body[name] for name in _TEMPLATE_FIELDS if body.get(name) is not None},
        )
        text = rendered.get("prompt") if isinstance(rendered, dict) else None
    else:
        text = body.get("prompt")
        if isinstance(text, list):
            reader.prompt = Ids.from_json(text)
            return
    if not isinstance(text, str):
        reader.ask.unavailable["prompt_token_ids"] = why("prompt_route_missing")
        return
    answer = yield "/tokenize", {"content": text, "add_special": True, "parse_special": True}
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    reader.prompt = Ids.from_json(tokens)
    if reader.prompt is None:
        reader.ask.unavailable["prompt_token_ids"] = why("prompt_route_missing")


class _Reader(Reader):
    def _check(self, completions: Any, missing: dict[str, Unavailable]) -> None:
        super()._check(completions, missing)
        found = missing.get("completion_token_ids")
        if found is not None and found.code == "count_mismatch_usage":
            sampled, told = sum(len(one.token_ids or ()) for one in completions), self.engine.sampled_count(self)
            if told is not None and sampled == told - 1 and self.request.get("stop"):
                missing["completion_token_ids"] = why("stop_token_not_returned", sampled=sampled, told=told)

    def _strip(self, body: dict[str, Any]) -> bool:
        """An agent that asked for fewer alternatives than we had to gets its own number."""
        changed = super()._strip(body)
        asked = self.request.get("top_logprobs")
        if not self.hide.logprobs and isinstance(asked, int) and "top_logprobs" in self.ask.injected:
            for part in body.get("choices") or ():
                for entry in ((part.get("logprobs") or {}).get("content") or ()) if isinstance(part, dict) else ():
                    if isinstance(entry, dict) and isinstance(entry.get("top_logprobs"), list):
                        entry["top_logprobs"] = entry["top_logprobs"][:asked]
                        changed = True
        return changed


def _has_media(messages: Any) -> bool:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") not in (None, "text"):
                return True
    return False
