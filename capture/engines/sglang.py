"""SGLang: ids by `return_token_ids` where nothing streams, by one late `sglext` chunk where it does (0.5.23)."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from capture.engines.base import (
    CHAT,
    CaptureOptions,
    Engine,
    Question,
    Reader,
    ResponseFilter,
    UpstreamRequest,
    how_it_ended,
)
from capture.engines.vllm import chat_logprobs, completion_logprobs, count_usage, ids, unstream
from capture.record import FIELDS, Ids
from capture.unavailable import why


class SGLang(Engine):
    name: ClassVar[str] = "sglang"
    null_when_unasked: ClassVar[frozenset[str]] = frozenset(("logprobs",))
    takes_prompt_ids: ClassVar[bool] = True

    def ask(self, wire: str, body: dict[str, Any], wants: CaptureOptions) -> UpstreamRequest:
        ask = UpstreamRequest(dict(body))
        ask.unstreamed = wants.buffered and body.get("stream") is True
        if ask.unstreamed:
            unstream(ask)
        if not wants.capture:
            return ask
        streams = body.get("stream") is True and not ask.unstreamed
        if wire == CHAT:
            injected = chat_logprobs(ask, wants, alone_is_refused=False)
            injected += _streamed_ids(ask) if streams else ids(ask)
        elif body.get("echo"):
            # 0.5.23 does not give logprobs with echo.
            ask.unavailable = dict.fromkeys(FIELDS, why("echo_prompt_logprobs_mixed"))
            injected = []
        else:
            injected = completion_logprobs(ask, wants) + ids(ask)
        if streams:
            injected += count_usage(ask)
        ask.injected = tuple(injected)
        return ask

    def hidden(self, wire: str, body: dict[str, Any]) -> ResponseFilter:
        hide = super().hidden(wire, body)
        return hide._replace(
            prompt=hide.prompt and not (body.get("return_prompt_token_ids") or body.get("return_input_ids_in_sglext")),
            sampled=hide.sampled and not body.get("return_output_ids_in_sglext"),
        )

    def step_is_ours(self, hide: ResponseFilter) -> bool:
        """SGLang sends the logprobs of a step without text on a chunk of their own (0.5.23, a parser configured)."""
        return hide.logprobs

    def prompt_count(self, reader: Reader) -> int | None:
        # The Kimi K3 template's count is three lower than its ids (0.5.23); any other difference still is one.
        told, prompt = super().prompt_count(reader), reader.sampled.prompt_ids()
        if told is not None and prompt is not None and "kimi" in str(reader.request.get("model")).lower():
            return len(prompt) if told + 3 == len(prompt) else told
        return told

    def logprobs_lost(self, reader: Reader, sampled: int, held: int) -> str:
        # Without a tool or reasoning parser 0.5.23 drops the logprobs of streamed steps that have no text.
        lost = held < sampled and reader.streamed
        return "logprobs_incomplete_in_stream" if lost else super().logprobs_lost(reader, sampled, held)

    def ids_lost_by_cut(self, reader: Reader) -> str:
        return "ids_lost_stream_aborted" if reader.wire == CHAT else "stream_aborted"

    # token-in: `input_ids` goes past the template and leaves parsers and grammars as they are (0.5.23).

    def render(self, body: dict[str, Any], messages: list[Any], *, to_be_answered: bool) -> Question:
        asked = {name: body[name] for name in _RENDERED if body.get(name) is not None}
        asked["messages"] = messages
        if not to_be_answered:  # left out, /tokenize renders as the chat route does
            asked["add_generation_prompt"] = False
        return "/tokenize", asked

    def read(self, ids: Ids) -> Question:
        return "/detokenize", {"tokens": ids.json(), "skip_special_tokens": False}

    def said(self, answer: Any) -> str | None:
        text = answer.get("text") if isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    def put_prompt(self, body: dict[str, Any], prompt: Ids) -> None:
        body["input_ids"] = prompt.json()

    def brings_prompt(self, body: dict[str, Any]) -> bool:
        return body.get("input_ids") is not None

    def ended(self, choice: dict[str, Any], body: dict[str, Any]) -> str:
        return how_it_ended(choice, "matched_stop", body, keeps_stop=bool(body.get("no_stop_trim")))


_RENDERED: Final = ("model", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")


def _streamed_ids(ask: UpstreamRequest) -> list[str]:
    """`return_token_ids` is refused on a streamed chat; two headers, and the fields of 0.5.23, are not."""
    ask.requested["token_ids"] = True
    ask.headers = {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1"}
    added = []
    for name in ("return_input_ids_in_sglext", "return_output_ids_in_sglext"):
        if not ask.body.get(name):
            ask.body[name] = True
            added.append(name)
    return added
