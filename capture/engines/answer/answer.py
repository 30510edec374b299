"""One call and what has come of its answer so far: what an engine's rules and the record's checks look at."""

from __future__ import annotations

from typing import Any, Final

from capture.engines.answer.choices import Sampled
from capture.engines.request import UpstreamRequest
from capture.engines.wires import COMPLETIONS
from capture.record import Unavailable
from capture.unavailable import why

#: The finish reasons of a reply that came to its end, or to the bound that the request set: OpenAI's, and
#: `repetition` (vLLM), `eos_token` and `stop_sequence` (TGI). Any other, such as `abort` or `error`, is a reply that
#: broke off.
FINISHED: Final = frozenset({
    "stop", "length", "tool_calls", "function_call", "content_filter", "repetition", "eos_token", "stop_sequence",
})  # fmt: skip


class Answer:
    """`request` is the agent's body, `upstream` the call that was made of it, `sampled` what has come so far.

    `started`: some of the answer came. `unreadable`: a part of it was not JSON. `error` is an error that the engine
    sent in place of an answer, or within one; None where it sent none.
    """

    def __init__(self, wire: str, request: dict[str, Any], upstream: UpstreamRequest, *, echoes: bool) -> None:
        """`echoes`: the engine's logprobs of a completions call with `echo` begin with the prompt's."""
        self.wire = wire
        self.request = request
        self.upstream = upstream
        self.started = False
        self.unreadable = False
        self.error: Any = None
        prompts = prompt_count(request) if wire == COMPLETIONS else 1
        self.several_prompts = prompts > 1
        #: Choices that were asked for, over all prompts.
        self.expected = (positive(request.get("n")) or 1) * prompts
        self.sampled = Sampled(
            echo=echoes and wire == COMPLETIONS and bool(request.get("echo")),
            top=positive(upstream.requested.get("top_logprobs")),
        )

    @property
    def finished(self) -> bool:
        """Every choice that was asked for has its finish reason."""
        return self.sampled.finished >= self.expected

    @property
    def unfinished(self) -> Unavailable | None:
        """Why an answer that came without an error in its place is still no reply that the model ended; None where it
        is one. An engine that is stopped, or whose weights change, answers 200 with what was sampled so far.
        """
        if self.sampled.error:
            return why("error_beside_choices")
        for choice in self.sampled.choices.values():
            for reason in (choice.finish_reason, choice.last_reason or choice.finish_reason):
                if not isinstance(reason, str) or reason not in FINISHED:
                    return why("reply_not_finished", reason="null" if reason is None else str(reason)[:80])
        return None

    @property
    def streamed(self) -> bool:
        """Whether the engine itself was asked to stream."""
        return bool(self.request.get("stream")) and not self.upstream.unstreamed

    @property
    def usage(self) -> dict[str, Any]:
        """The engine's last `usage` object; empty while there is none."""
        return self.sampled.usage

    def usage_count(self, name: str) -> int | None:
        """A count of the engine's usage, such as `completion_tokens`; None where it is missing."""
        value = self.sampled.usage.get(name)
        return value if type(value) is int else None


def prompt_count(body: dict[str, Any]) -> int:
    """How many prompts a completions request has."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def positive(value: Any) -> int | None:
    """`value` where it is an int above 0."""
    return value if type(value) is int and value > 0 else None
