"""vLLM: ids by `return_token_ids`, logprobs by `logprobs`, streamed and not (0.10.2 and newer; checked on 0.32)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from capture.engines.answer.answer import Answer
from capture.engines.base import Engine, reply_end
from capture.engines.inject import chat_logprobs, completion_logprobs, final_usage, token_ids, upstream_request
from capture.engines.meaning import ENGINE_DEFAULT, LOGPROBS, NOT_APPLIED, LogprobMeaning
from capture.engines.request import CaptureOptions, FollowUp, UpstreamRequest
from capture.engines.wires import CHAT
from capture.record import FIELDS, Ids
from capture.unavailable import why


class VLLM(Engine):
    name: ClassVar[str] = "vllm"
    identity_routes: ClassVar[tuple[str, ...]] = ("/version",)
    #: `--logprobs-mode raw_logprobs`, the default since the option exists (0.10): taken before temperature, top_k and
    #: penalties. `processed_logprobs` has all of them; no route says which is on. Measured on 0.32.
    logprobs: ClassVar[LogprobMeaning] = LogprobMeaning(NOT_APPLIED, NOT_APPLIED, LOGPROBS, ENGINE_DEFAULT)
    #: vLLM 0.32 answers with these keys as null where nobody asked, in streams too.
    null_when_unasked: ClassVar[frozenset[str]] = frozenset(("logprobs", "token_ids", "prompt_token_ids"))
    on_last_chunk: ClassVar[tuple[str, ...]] = ("system_fingerprint",)
    echoes_logprobs: ClassVar[bool] = True
    takes_prompt_ids: ClassVar[bool] = True

    @classmethod
    def recognize(cls, answers: Mapping[str, Any]) -> tuple[str, str | None] | None:
        found = answers.get("/version")
        version = found.get("version") if isinstance(found, dict) else None
        return (cls.name, version) if isinstance(version, str) else None

    def ask(self, wire: str, body: dict[str, Any], options: CaptureOptions) -> UpstreamRequest:
        upstream = upstream_request(body, options)
        if not options.capture:
            return upstream
        injected = _chat(upstream, options) if wire == CHAT else _completions(upstream, options)
        if body.get("stream") is True and not upstream.unstreamed:
            injected += final_usage(upstream)
        upstream.injected = tuple(injected)
        return upstream

    def ids_lost(self, answer: Answer, sampled: int, counted: int) -> str:
        # vLLM before #29074 (0.13) drops the ids of streamed chunks that its tool parser swallows.
        lost = sampled < counted and answer.streamed and bool(answer.request.get("tools"))
        return "streamed_tokens_dropped_by_parser" if lost else super().ids_lost(answer, sampled, counted)

    # token-in: `kv_transfer_params.prompt_token_ids` is read by the chat route of any vLLM that knows it (0.32,
    # `renderers/online_renderer.py`), with or without a connector; /tokenize takes what shapes a chat's prompt but the
    # two fields that the chat route itself hands to the template as arguments (`build_chat_params`).

    def render(self, body: dict[str, Any], messages: list[Any], *, to_be_answered: bool) -> FollowUp:
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

    def detokenize(self, ids: Ids) -> FollowUp:
        return "/detokenize", {"tokens": ids.json()}

    def parse_detokenized(self, answer: Any) -> str | None:
        text = answer.get("prompt") if isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    def set_prompt_ids(self, body: dict[str, Any], prompt: Ids) -> None:
        body["kv_transfer_params"] = {"prompt_token_ids": prompt.json()}

    def has_prompt_ids(self, body: dict[str, Any]) -> bool:
        return body.get("kv_transfer_params") is not None

    def reply_end(self, choice: dict[str, Any], body: dict[str, Any]) -> str:
        return reply_end(choice, "stop_reason", body, keeps_stop=bool(body.get("include_stop_str_in_output")))


_RENDERED: Final = (
    "model", "tools", "chat_template", "chat_template_kwargs", "add_special_tokens", "media_io_kwargs",
    "mm_processor_kwargs",
)  # fmt: skip


def _chat(upstream: UpstreamRequest, options: CaptureOptions) -> list[str]:
    return [] if _beams(upstream) else chat_logprobs(upstream, options) + token_ids(upstream)


def _beams(upstream: UpstreamRequest) -> bool:
    if not upstream.body.get("use_beam_search"):
        return False
    upstream.unavailable = dict.fromkeys(FIELDS, why("beam_search"))
    return True


def _completions(upstream: UpstreamRequest, options: CaptureOptions) -> list[str]:
    body = upstream.body
    if _beams(upstream):
        return []
    injected = completion_logprobs(upstream, options)
    if body.get("echo") and not body.get("return_token_ids"):
        # return_token_ids takes the prompt out of an echoed text (0.32): asking would change what the agent sees.
        upstream.unavailable = dict.fromkeys(FIELDS, why("echo_prompt_logprobs_mixed"))
        return injected
    return injected + token_ids(upstream)
