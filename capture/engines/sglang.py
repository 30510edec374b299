"""SGLang: ids by `return_token_ids` where nothing streams, by one late `sglext` chunk where it does (0.5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from capture.engines.answer.answer import Answer
from capture.engines.answer.strip import ResponseFilter
from capture.engines.base import Engine, reply_end
from capture.engines.inject import chat_logprobs, completion_logprobs, final_usage, token_ids, upstream_request
from capture.engines.meaning import APPLIED, ENGINE_DEFAULT, LOGPROBS, NOT_APPLIED, LogprobMeaning
from capture.engines.request import CaptureOptions, FollowUp, UpstreamRequest
from capture.engines.wires import CHAT
from capture.json import as_object
from capture.record import FIELDS, Ids
from capture.unavailable import why

_META_INFO: Final = frozenset(("meta_info",))


class SGLang(Engine):
    name: ClassVar[str] = "sglang"
    identity_routes: ClassVar[tuple[str, ...]] = ("/get_model_info", "/server_info")
    flat_errors: ClassVar[bool] = True
    #: After temperature, before top_k, top_p and min_p. Measured on 0.5.23.
    logprobs: ClassVar[LogprobMeaning] = LogprobMeaning(APPLIED, NOT_APPLIED, LOGPROBS, ENGINE_DEFAULT)
    null_when_unasked: ClassVar[frozenset[str]] = frozenset(("logprobs",))
    takes_prompt_ids: ClassVar[bool] = True

    @classmethod
    def recognize(cls, answers: Mapping[str, Any]) -> tuple[str, str | None] | None:
        info = answers.get("/get_model_info")
        if not isinstance(info, dict) or "model_path" not in info or "/server_info" not in answers:
            return None
        server = answers["/server_info"]
        version = server.get("version") if isinstance(server, dict) else None
        return cls.name, version if isinstance(version, str) else None

    @classmethod
    def sampling_defaults(cls, answers: Mapping[str, Any]) -> dict[str, Any] | None:
        """SGLang started with `--sampling-defaults openai` says so; they are then its own, which are neutral."""
        info = answers.get("/server_info")
        openai = isinstance(info, dict) and info.get("sampling_defaults") == "openai"
        return dict(_OWN_SAMPLING) if openai else None

    def ask(self, wire: str, body: dict[str, Any], options: CaptureOptions) -> UpstreamRequest:
        upstream = upstream_request(body, options)
        if not options.capture:
            return upstream
        streams = body.get("stream") is True and not upstream.unstreamed
        if wire == CHAT:
            injected = chat_logprobs(upstream, options, alone_is_refused=False)
            injected += _streamed_ids(upstream) if streams else token_ids(upstream)
        elif body.get("echo"):
            # 0.5.23 does not give logprobs with echo.
            upstream.unavailable = dict.fromkeys(FIELDS, why("echo_prompt_logprobs_mixed"))
            injected = []
        else:
            injected = completion_logprobs(upstream, options) + token_ids(upstream)
        if streams:
            injected += final_usage(upstream)
        upstream.injected = tuple(injected)
        return upstream

    def response_filter(self, wire: str, body: dict[str, Any]) -> ResponseFilter:
        hide = super().response_filter(wire, body)
        return hide._replace(
            prompt=hide.prompt and not (body.get("return_prompt_token_ids") or body.get("return_input_ids_in_sglext")),
            sampled=hide.sampled and not body.get("return_output_ids_in_sglext"),
            # 0.5.23 gives it, logprobs and all, to whoever asks for ids.
            more=frozenset() if body.get("return_token_ids") or body.get("return_meta_info") else _META_INFO,
        )

    def empty_steps_are_ours(self, hide: ResponseFilter) -> bool:
        """SGLang sends the logprobs of a step without text on a chunk of their own (0.5.23, a parser configured)."""
        return hide.logprobs

    def prompt_count(self, answer: Answer) -> int | None:
        # The Kimi K3 template's count is three lower than its ids (0.5.23); any other difference still is one.
        counted, prompt = super().prompt_count(answer), answer.sampled.prompt_ids()
        if counted is not None and prompt is not None and "kimi" in str(answer.request.get("model")).lower():
            return len(prompt) if counted + 3 == len(prompt) else counted
        return counted

    def logprobs_lost(self, answer: Answer, sampled: int, logprobs: int) -> str:
        # Without a tool or reasoning parser 0.5.23 drops the logprobs of streamed steps that have no text.
        lost = logprobs < sampled and answer.streamed
        return "logprobs_incomplete_in_stream" if lost else super().logprobs_lost(answer, sampled, logprobs)

    def weight_versions(self, answer: dict[str, Any]) -> list[Any] | None:
        # 0.5.23, unstreamed alone. `metadata` is of the first choice; "default" is the name where nobody gave one.
        choices = answer.get("choices")
        metas = (
            [as_object(as_object(choice).get("meta_info")) for choice in choices] if isinstance(choices, list) else []
        )
        found = [meta.get("weight_versions") for meta in metas]
        if found and found[0] is None:
            found[0] = as_object(answer.get("metadata")).get("weight_versions")
        named = any(
            as_object(row).get("version") != "default" for rows in found if isinstance(rows, list) for row in rows
        )
        return found if named else None

    def ids_lost_by_cut(self, answer: Answer) -> str:
        return "ids_lost_stream_aborted" if answer.wire == CHAT else "stream_aborted"

    # token-in: `input_ids` goes past the template and leaves parsers and grammars as they are (0.5.23).

    def render(self, body: dict[str, Any], messages: list[Any], *, to_be_answered: bool) -> FollowUp:
        asked = {name: body[name] for name in _RENDERED if body.get(name) is not None}
        asked["messages"] = messages
        if not to_be_answered:  # left out, /tokenize renders as the chat route does
            asked["add_generation_prompt"] = False
        return "/tokenize", asked

    def detokenize(self, ids: Ids) -> FollowUp:
        return "/detokenize", {"tokens": ids.json(), "skip_special_tokens": False}

    def parse_detokenized(self, answer: Any) -> str | None:
        text = answer.get("text") if isinstance(answer, dict) else None
        return text if isinstance(text, str) else None

    def set_prompt_ids(self, body: dict[str, Any], prompt: Ids) -> None:
        body["input_ids"] = prompt.json()

    def has_prompt_ids(self, body: dict[str, Any]) -> bool:
        return body.get("input_ids") is not None

    def reply_end(self, choice: dict[str, Any], body: dict[str, Any]) -> str:
        return reply_end(choice, "matched_stop", body, keeps_stop=bool(body.get("no_stop_trim")))


#: `ChatCompletionRequest._DEFAULT_SAMPLING_PARAMS` of SGLang 0.5.23.
_OWN_SAMPLING: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_RENDERED: Final = ("model", "tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")


def _streamed_ids(upstream: UpstreamRequest) -> list[str]:
    """`return_token_ids` is refused on a streamed chat; two headers, and the fields of 0.5.23, are not."""
    upstream.requested["token_ids"] = True
    upstream.headers = {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1"}
    added = []
    for name in ("return_input_ids_in_sglext", "return_output_ids_in_sglext"):
        if not upstream.body.get(name):
            upstream.body[name] = True
            added.append(name)
    return added
