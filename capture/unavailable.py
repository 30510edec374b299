"""Why something is not captured: each code with BenchFlow's reason above it and a sentence that says what to do."""

from __future__ import annotations

from typing import Any, Final

from capture.record import Unavailable

_NOT_RETURNED: Final = "not_returned"
_UNSUPPORTED: Final = "provider_api_unsupported"
_NOT_REQUESTED: Final = "not_requested"
_FAILED: Final = "request_failed"

#: code -> (reason, sentence)
CODES: Final[dict[str, tuple[str, str]]] = {
    "engine_unsupported": (
        _UNSUPPORTED,
        "this API returns no token ids; serve the model with vLLM, SGLang or llama.cpp to capture its tokens",
    ),
    "endpoint_has_no_token_ids": (_UNSUPPORTED, "this route of the engine returns no token ids; call chat completions"),
    "capture_off": (_NOT_REQUESTED, "capture was off; set BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1"),
    "echo_prompt_logprobs_mixed": (
        _NOT_REQUESTED,
        "with `echo`, asking for ids would change the text the agent gets, so they were not asked for; call without "
        "echo",
    ),
    "echo_logprobs_not_told_apart": (
        _NOT_RETURNED,
        "with `echo` the number of logprobs is not that of prompt and sampled ids together, so they cannot be "
        "assigned; "
        "call without echo, or with max_tokens of at least 1",
    ),
    "invalid_logprobs_request": (
        _NOT_REQUESTED,
        "the agent sent `top_logprobs` without `logprobs`, which engines refuse; send both, or neither",
    ),
    "beam_search": (_UNSUPPORTED, "beam search has no logprobs of sampled tokens; call without use_beam_search"),
    "server_ignored_return_token_ids": (
        _NOT_RETURNED,
        "the engine answered without the token ids that were asked for: it is older than token ids on this route, or a "
        "gateway before it drops the field; upgrade it, point the proxy at the engine itself, or, where only streams "
        "lack them (older SGLang), start the proxy with --buffered",
    ),
    "server_refused_capture_fields": (
        _NOT_RETURNED,
        "the engine refused the fields that ask for tokens ({told}); upgrade it, or start it with logprobs allowed",
    ),
    "logprobs_not_returned": (
        _NOT_RETURNED,
        "the engine answered without the logprobs that were asked for; start it with logprobs allowed, or upgrade it",
    ),
    "hidden_by_include_reasoning": (
        _NOT_RETURNED,
        "`include_reasoning: false` makes vLLM leave out ids and logprobs; let the agent ask for reasoning",
    ),
    "no_prompt_ids": (
        _NOT_RETURNED,
        "the engine did not return the prompt's token ids; upgrade it, or point the proxy at the engine itself",
    ),
    "several_prompts": (
        _NOT_RETURNED,
        "the call had several prompts; each completion has the ids of its own prompt, where the engine returns them; "
        "send one prompt per call",
    ),
    "no_choices": (_NOT_RETURNED, "the engine's answer has no choices; look at its log"),
    "choices_missing": (_NOT_RETURNED, "the engine's answer has fewer choices than `n`; look at its log"),
    "count_mismatch_ids_logprobs": (
        _NOT_RETURNED,
        "there are {sampled} sampled ids and {told} logprobs; upgrade the engine, or start the proxy with --buffered",
    ),
    "count_mismatch_usage": (
        _NOT_RETURNED,
        "the engine returned {sampled} ids and counted {told}; upgrade the engine, or start the proxy with --buffered",
    ),
    "usage_not_returned": (
        _NOT_RETURNED,
        "the engine did not return how many tokens it sampled, so the ids cannot be checked; upgrade it",
    ),
    "streamed_tokens_dropped_by_parser": (
        _NOT_RETURNED,
        "{sampled} of {told} sampled ids were returned: vLLM before 0.13 (vllm #29074) drops ids of streamed tool "
        "calls; "
        "upgrade, or start the proxy with --buffered",
    ),
    "logprobs_incomplete_in_stream": (
        _NOT_RETURNED,
        "{told} logprobs were returned for {sampled} sampled ids: SGLang without a parser drops those of steps "
        "without text; "
        "start it with --tool-call-parser, or the proxy with --buffered",
    ),
    "stop_token_not_returned": (
        _NOT_RETURNED,
        "{sampled} of {told} sampled ids were returned: llama.cpp leaves out the token that completes a stop string; "
        "let the "
        "reply end by its stop token instead",
    ),
    "character_ids_not_returned": (
        _NOT_RETURNED,
        "{sampled} of {told} sampled ids were returned: llama.cpp returns a character of several tokens (an emoji, a "
        "rare script) as one entry; serve the model with vLLM or SGLang where replies have such characters",
    ),
    "choice_not_counted": (
        _NOT_RETURNED,
        "llama.cpp counts only the first of n choices, and another one may lack ids (a stop string, a character of "
        "several tokens); ask for one choice per call",
    ),
    "logprob_missing_for_token": (
        _NOT_RETURNED,
        "a sampled token was returned without its logprob; upgrade the engine",
    ),
    "logprob_clamped": (
        _NOT_RETURNED,
        "a logprob was minus infinity, sent as -9999: the sampler chose a token the recorded distribution excludes; "
        "serve with raw logprobs, or without the cut that excludes it",
    ),
    "logprob_not_finite": (
        _NOT_RETURNED,
        "a logprob was NaN or infinite: the model's logits were broken at that token; look at its weights and dtype",
    ),
    "logits_not_logprobs": (
        _NOT_RETURNED,
        "a logprob was above 0, or the probabilities of a token's alternatives, here or in the proxy's probe, sum "
        "above 1: these are logits; start vLLM with --logprobs-mode raw_logprobs",
    ),
    "ids_malformed": (
        _NOT_RETURNED,
        "the engine sent token ids that are not non-negative integers; check its version",
    ),
    "answer_unreadable": (_NOT_RETURNED, "a part of the engine's answer was not JSON; look at its log"),
    "prompt_route_missing": (
        _NOT_RETURNED,
        "the engine did not answer /apply-template and /tokenize, which give the prompt's ids; upgrade llama.cpp",
    ),
    "prompt_has_media": (_UNSUPPORTED, "the prompt has images or audio, whose ids llama.cpp does not return"),
    "capture_failed": (_NOT_RETURNED, "the proxy could not read the engine's answer ({fault}); please report it"),
    "stream_aborted": (_FAILED, "the agent closed the connection before the reply was complete; what arrived is kept"),
    "ids_lost_stream_aborted": (
        _FAILED,
        "the agent closed the connection before the reply was complete, and SGLang sends ids only at its end",
    ),
    "stream_error": (
        _FAILED,
        "the engine's reply broke off or contained an error; what arrived is kept; look at its log",
    ),
    "reply_not_finished": (
        _FAILED,
        "the engine ended the reply before the model did (finish_reason {reason}), as one that is stopped, or whose "
        "weights change, does; what arrived is kept; make the call again",
    ),
    "error_beside_choices": (
        _FAILED,
        "the engine's answer has an error beside its choices, so the reply broke off; what arrived is kept; look at "
        "its "
        "log",
    ),
    "answers_mixed": (
        _NOT_RETURNED,
        "the {what} changed within one answer, so it has the tokens of more than one call; look at the gateway before "
        "the engine",
    ),
    "prompt_too_long": (
        _FAILED,
        "the prompt no longer fits the model's context; the engine refused it before anything was sampled",
    ),
    "never_sent": (
        _FAILED,
        "the agent closed the connection, or its session was closed, before the request was sent to the engine; "
        "nothing was sampled",
    ),
    "refused_by_proxy": (_FAILED, "the proxy did not send this request to the engine: {refusal}"),
    "budget_reached": (
        _FAILED,
        "the session's budget ({limit} {maximum}) was used up, so the proxy answered this call itself, and nothing was "
        "sampled",
    ),
    "upstream_http_error": (_FAILED, "the engine answered HTTP {status}; its message is in response.body"),
}


def why(code: str, **facts: Any) -> Unavailable:
    """The reason, code and sentence of `code`, with the facts of this call in it."""
    reason, detail = CODES[code]
    return Unavailable(reason, code, detail.format_map(_Facts(facts)))


class _Facts(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"
