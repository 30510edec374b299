"""Which of a call's tokens are missing, and why: the answer checked against the request and the engine's own counts."""

from __future__ import annotations

from capture.engines.answer.answer import Answer
from capture.engines.base import Engine
from capture.record import FIELDS, Completion, Unavailable, are_alternatives
from capture.unavailable import why


def of_failed(status: int, failure: str | None = None) -> dict[str, Unavailable]:
    """For a call that the engine did not answer: everything. `failure` says what happened where no engine answered."""
    reason = why("upstream_http_error", status=status)
    return dict.fromkeys(FIELDS, reason if failure is None else Unavailable(reason.reason, reason.code, failure))


def of_cut_short(engine: Engine, answer: Answer, outcome: str, completions: list[Completion]) -> dict[str, Unavailable]:
    """For a call that was `aborted` or `truncated`, or whose answer has an error in the middle."""
    missing = dict(answer.upstream.unavailable)
    code = "stream_aborted" if outcome == "aborted" else "stream_error"
    lost = engine.ids_lost_by_cut(answer) if outcome == "aborted" else code
    no_ids = not completions or any(completion.token_ids is None for completion in completions)
    missing.setdefault("completion_token_ids", why(lost if no_ids else code))
    missing.setdefault("logprobs", why(code))
    if answer.sampled.prompt_ids() is None:
        missing.setdefault("prompt_token_ids", why(lost))
    return missing


def of_finished(engine: Engine, answer: Answer, completions: list[Completion]) -> dict[str, Unavailable]:
    """For a call whose answer is complete: nothing, where the model ended it and the engine's own counts agree."""
    missing = dict(answer.upstream.unavailable)
    known = set(missing)
    hidden = answer.request.get("include_reasoning") is False
    if (unfinished := answer.unfinished) is not None:
        missing.setdefault("completion_token_ids", unfinished)
        missing.setdefault("logprobs", unfinished)
    if len(completions) < answer.expected:
        for name in ("completion_token_ids", "logprobs"):
            missing.setdefault(name, why("choices_missing" if completions else "no_choices"))
    for choice in answer.sampled.choices.values():
        if choice.malformed:
            missing.setdefault("completion_token_ids", why("ids_malformed"))
        if choice.problem:
            missing.setdefault("logprobs", why(choice.problem))
    no_ids = no_logprobs = False
    for completion in completions:
        no_ids = no_ids or completion.token_ids is None
        no_logprobs = no_logprobs or completion.logprobs is None
        if completion.top_logprobs and not are_alternatives(completion.top_logprobs):
            missing.setdefault("logprobs", why("logits_not_logprobs"))
    changed = answer.sampled.changed or (None if answer.several_prompts else answer.sampled.prompts_differ())
    if changed is not None:
        mixed = why("answers_mixed", what=changed)
        for name in FIELDS:
            missing.setdefault(name, mixed)
    if no_ids:
        code = "hidden_by_include_reasoning" if hidden else engine.ids_missing(answer)
        sampled = sum(len(completion.token_ids or ()) for completion in completions)
        reported = answer.usage_count("completion_tokens")
        missing.setdefault(
            "completion_token_ids", why(code, sampled=sampled, told="?" if reported is None else reported)
        )
    if no_logprobs:
        missing.setdefault("logprobs", why("hidden_by_include_reasoning" if hidden else "logprobs_not_returned"))
    _check_prompt(engine, answer, missing)
    _check_counts(engine, answer, completions, missing)
    if answer.unreadable:
        # The counts show whether the unreadable part had any of what is missing.
        for name in set(missing) - known:
            missing[name] = why("answer_unreadable")
    return missing


def _check_prompt(engine: Engine, answer: Answer, missing: dict[str, Unavailable]) -> None:
    if answer.several_prompts:
        missing.setdefault("prompt_token_ids", why("several_prompts"))
        return
    prompt, reported = answer.sampled.prompt_ids(), engine.prompt_count(answer)
    if prompt is None:
        missing.setdefault("prompt_token_ids", why("no_prompt_ids"))
    elif reported is not None and reported != len(prompt):
        missing.setdefault("prompt_token_ids", why("count_mismatch_usage", sampled=len(prompt), told=reported))


def _check_counts(
    engine: Engine, answer: Answer, completions: list[Completion], missing: dict[str, Unavailable]
) -> None:
    if "completion_token_ids" in missing:
        return
    sampled, differ = 0, False
    for completion in completions:
        count = len(completion.token_ids or ())
        sampled += count
        differ = differ or len(completion.logprobs or ()) != count
    reported = engine.sampled_count(answer)
    if reported is None:
        missing["completion_token_ids"] = why(engine.count_missing(answer))
    elif sampled != reported:
        missing["completion_token_ids"] = why(
            engine.ids_lost(answer, sampled, reported), sampled=sampled, told=reported
        )
    if differ:
        logprob_count = sum(len(completion.logprobs or ()) for completion in completions)
        missing.setdefault(
            "logprobs", why(engine.logprobs_lost(answer, sampled, logprob_count), sampled=sampled, told=logprob_count)
        )
