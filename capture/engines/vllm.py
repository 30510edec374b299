"""vLLM: ids by `return_token_ids`, logprobs by `logprobs`, streamed and not (0.10.2 and newer; checked on 0.32)."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from capture.engines.base import CHAT, CaptureOptions, Engine, Question, Reader, UpstreamRequest, flag, how_it_ended
from capture.record import FIELDS, Ids
from capture.unavailable import why


class VLLM(Engine):
    name: ClassVar[str] = "vllm"
    #: vLLM 0.32 answers with these keys as null where nobody asked, in streams too.
    null_when_unasked: ClassVar[frozenset[str]] = frozenset(("logprobs", "token_ids", "prompt_token_ids"))
    on_last_chunk: ClassVar[tuple[str, ...]] = ("system_fingerprint",)
    echoes_logprobs: ClassVar[bool] = True
    takes_prompt_ids: ClassVar[bool] = True

    def ask(self, wire: str, body: dict[str, Any], wants: CaptureOptions) -> UpstreamRequest:
        ask = UpstreamRequest(dict(body))
        ask.unstreamed = wants.buffered and body.get("stream") is True
        if ask.unstreamed:
            unstream(ask)
        if not wants.capture:
            return ask
        injected = _chat(ask, wants) if wire == CHAT else _completions(ask, wants)
        if body.get("stream") is True and not ask.unstreamed:
            injected += count_usage(ask)
        ask.injected = tuple(injected)
        return ask

    def ids_lost(self, reader: Reader, sampled: int, told: int) -> str:
        # vLLM before #29074 (0.13) drops the ids of streamed chunks that its tool parser swallows.
        lost = sampled < told and reader.streamed and bool(reader.request.get("tools"))
        return "streamed_tokens_dropped_by_parser" if lost else super().ids_lost(reader, sampled, told)

    # token-in: `kv_transfer_params.prompt_token_ids` is read by the chat route of any vLLM that knows it (0.32,
    # `renderers/online_renderer.py`), with or without a connector; /tokenize takes what shapes a chat's prompt but the
    # two fields that the chat route itself hands to the template as arguments (`build_chat_params`).

    def render(self, body: dict[str, Any], messages: list[Any], *, to_be_answered: bool) -> Question:
        asked = {name: body[name] for name in _RENDERED if body.get(name) is not None}
        asked |= {"messages": messages, "add_generation_prompt": to_be_answered}
        more = {name: body[name] for name in ("documents", "reasoning_effort") if body.get(name) is not None}
        if more:
            given = body.get("chat_template_kwargs")
            kwargs = (given if isinstance(given, dict) else {}) | more
            if "reasoning_effort" in more:
                kwargs.setdefault("enable_thinking", more["reasoning_effort"] != "none")
            asked["chat_template_kwargs"] = kwargs
        return "/tokenize", asked

    def read(self, ids: Ids) -> Question:
        return "/detokenize", {"tokens": ids.json()}

    def said(self, answer: Any) -> str | None:
        text = answer.get("prompt") if isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    def put_prompt(self, body: dict[str, Any], prompt: Ids) -> None:
        body["kv_transfer_params"] = {"prompt_token_ids": prompt.json()}

    def brings_prompt(self, body: dict[str, Any]) -> bool:
        return body.get("kv_transfer_params") is not None

    def ended(self, choice: dict[str, Any], body: dict[str, Any]) -> str:
        return how_it_ended(choice, "stop_reason", body, keeps_stop=bool(body.get("include_stop_str_in_output")))


_RENDERED: Final = (
    "model", "tools", "chat_template", "chat_template_kwargs", "add_special_tokens", "media_io_kwargs",
    "mm_processor_kwargs",
)  # fmt: skip


def unstream(ask: UpstreamRequest) -> None:
    """Calls without a stream; vLLM and SGLang refuse `stream_options` then."""
    ask.body["stream"] = False
    ask.body.pop("stream_options", None)


def count_usage(ask: UpstreamRequest) -> list[str]:
    """Asks for the final count, and no count a chunk that the agent would not have had."""
    options = ask.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        return []
    if options is not None and not isinstance(options, dict):
        return []  # the agent's own mistake; the engine says so
    kept = {name: value for name, value in (options or {}).items() if name != "continuous_usage_stats"}
    ask.body["stream_options"] = {**kept, "include_usage": True}
    return ["stream_options"]


def chat_logprobs(
    ask: UpstreamRequest, wants: CaptureOptions, *, at_least: int = 0, alone_is_refused: bool = True
) -> list[str]:
    """Asks for one logprob a sampled token, and for the alternatives that are wanted; what the agent asked for stays.

    `at_least` alternatives are asked for where an engine gives no logprobs without. `alone_is_refused`: the engine
    answers 400 to `top_logprobs` without `logprobs` (vLLM 0.32 and llama.cpp do, SGLang 0.5.23 does not).
    """
    body = ask.body
    own, asked = flag(body.get("logprobs")), body.get("top_logprobs")
    if not own and asked and alone_is_refused:
        # `top_logprobs` without `logprobs` is the agent's own mistake: it keeps the engine's 400.
        ask.unavailable["logprobs"] = why("invalid_logprobs_request")
        return []
    ask.requested["logprobs"] = True
    ask.requested["top_logprobs"] = asked if own else wants.top_logprobs
    injected = []
    if not own:
        body["logprobs"] = True
        injected.append("logprobs")
    top = max(at_least, 0 if own else wants.top_logprobs or 0)
    if top and (not own or asked == 0):
        body["top_logprobs"] = top
        injected.append("top_logprobs")
    return injected


def _chat(ask: UpstreamRequest, wants: CaptureOptions) -> list[str]:
    return [] if _beams(ask) else chat_logprobs(ask, wants) + ids(ask)


def _beams(ask: UpstreamRequest) -> bool:
    if not ask.body.get("use_beam_search"):
        return False
    ask.unavailable = dict.fromkeys(FIELDS, why("beam_search"))
    return True


def ids(ask: UpstreamRequest) -> list[str]:
    ask.requested["token_ids"] = True
    if ask.body.get("return_token_ids"):
        return []
    ask.body["return_token_ids"] = True
    return ["return_token_ids"]


def _completions(ask: UpstreamRequest, wants: CaptureOptions) -> list[str]:
    body = ask.body
    if _beams(ask):
        return []
    injected = completion_logprobs(ask, wants)
    if body.get("echo") and not body.get("return_token_ids"):
        # return_token_ids takes the prompt out of an echoed text (0.32): asking would change what the agent sees.
        ask.unavailable = dict.fromkeys(FIELDS, why("echo_prompt_logprobs_mixed"))
        return injected
    return injected + ids(ask)


def completion_logprobs(ask: UpstreamRequest, wants: CaptureOptions) -> list[str]:
    """`logprobs: 0` gives the sampled token's logprob alone."""
    asked = ask.body.get("logprobs")
    own = asked is not None and asked is not False
    ask.requested["logprobs"] = True
    ask.requested["top_logprobs"] = (int(asked) if isinstance(asked, int) else None) if own else wants.top_logprobs
    if own:
        return []
    ask.body["logprobs"] = wants.top_logprobs or 0
    return ["logprobs"]
