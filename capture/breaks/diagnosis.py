"""Why a call does not continue the one before it: the first differing token, both windows, the cause.

There are two kinds of evidence. The tokens: where the ids diverge, and their text where a tokenizer is given. The
messages, where the log has them: how what the agent sent back differs from what it got. A cause is `certain` only when
the evidence excludes the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from capture.breaks.breaks import Break, CallView, TokenDecoder
from capture.breaks.message_compare import calls_of, first_change, json_equal_texts, one_gap, same_arguments
from capture.chat.messages import (
    has_image,
    opens_reasoning,
    reasoning_of,
    split_system,
    text_of,
    tool_calls,
    without_reasoning,
)

#: Codes of an incomplete capture that mean: ids were sampled and did not come.
_DROPPED: Final = frozenset({
    "streamed_tokens_dropped_by_parser", "count_mismatch_usage", "stop_token_not_returned", "ids_malformed",
    "server_ignored_return_token_ids", "no_completion_ids",
})  # fmt: skip
_CUT: Final = frozenset({"stream_aborted", "ids_lost_stream_aborted", "stream_error"})
#: Ids of each side that are shown.
WINDOW: Final = 8
_RUN: Final = 4


def diagnose(before: CallView, after: CallView, decoder: TokenDecoder | None = None) -> Break:
    """Why `after` does not begin with the prompt and the sampled ids of `before`."""
    before_ids = before.prompt + before.sampled
    index = before_ids.common(after.prompt)
    ours, theirs = before_ids.tolist(), after.prompt.tolist()
    split = len(before.prompt)
    place = _Place(before, after, ours, theirs, index, split, decoder)
    cause, sure = _in_prompt(place) if index < split else _in_reply(place)
    shared, expected = ours[max(0, index - WINDOW) : index], ours[index : index + WINDOW]
    found = theirs[index : index + WINDOW]
    return Break(
        call=after.call,
        before=before.call,
        index=index,
        region="prompt" if index < split else "sampled",
        offset=index if index < split else index - split,
        kept=shared,
        expected=expected,
        found=found,
        cause=cause,
        sure=sure,
        texts=(decoder.text(shared), decoder.text(expected), decoder.text(found)) if decoder is not None else None,
    )


@dataclass(frozen=True)
class _Place:
    """Where two id lists diverge, at `index`: `ours` is the earlier prompt and its sampled ids, `theirs` the new
    prompt.

    `split` is the index in `ours` at which the sampled ids start.
    """

    before: CallView
    after: CallView
    ours: list[int]
    theirs: list[int]
    index: int
    split: int
    decoder: TokenDecoder | None

    @property
    def messages(self) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """What was sent, before and after, where both are known."""
        if self.before.messages is None or self.after.messages is None:
            return None
        return self.before.messages, self.after.messages

    @property
    def sent_back(self) -> dict[str, Any] | None:
        """The assistant message in which the agent sent the reply back."""
        if self.messages is None:
            return None
        earlier, later = (split_system(messages)[1] for messages in self.messages)
        following = later[len(earlier) : len(earlier) + 1]
        return next((dict(message) for message in following if message.get("role") == "assistant"), None)


# the earlier prompt was changed


def _in_prompt(place: _Place) -> tuple[str, str]:
    before, after = place.before, place.after
    images = has_image(before.messages) or has_image(after.messages)
    if _in_a_run(place) and (images or place.messages is None):
        return "image_placeholders", "certain" if images else "possible"
    if place.messages is None:
        if _thinking_is_gone(place):
            return "reasoning_stripped", "likely"
        return "unknown", "possible"
    (our_system, earlier), (their_system, later) = (split_system(messages) for messages in place.messages)
    index = first_change(earlier, later)
    if our_system != their_system:
        return "system_or_tools_changed", "certain"
    if before.tools != after.tools:
        return "system_or_tools_changed", "certain" if index is None else "likely"
    if index is None:
        if _left_out(place, earlier, later) and place.split - place.index <= WINDOW:
            return "history_edited", "certain"
        # Every message is unchanged, yet an old one is rendered differently.
        gone = _thinking_is_gone(place)
        if gone or any(reasoning_of(message) or opens_reasoning(text_of(message)) for message in earlier):
            return "reasoning_stripped", "certain" if gone else "likely"
        return "unknown", "possible"
    hidden = any(reasoning_of(message) or opens_reasoning(text_of(message)) for message in earlier[:index])
    sure = "likely" if hidden else "certain"
    was, now = earlier[index], later[index] if index < len(later) else None
    if now is None:
        return "history_edited", sure
    if same_arguments(was, now) and text_of(was) == text_of(now):
        return "arguments_reserialized", sure
    if _reasoning_is_the_difference(was, now):
        return "reasoning_stripped", sure
    return "history_edited", sure


def _left_out(place: _Place, earlier: Sequence[Any], later: Sequence[Any]) -> bool:
    """Whether the agent continued without the reply, as mini-swe-agent does with one that calls no tool."""
    following = later[len(earlier) : len(earlier) + 1]
    return bool(following) and following[0].get("role") != "assistant"


def _thinking_is_gone(place: _Place) -> bool:
    """The earlier text continues with reasoning, the new one with what follows the reasoning."""
    if place.decoder is None:
        return False
    back = max(0, place.index - 4)
    ours = place.decoder.text(place.ours[back : place.index + 4096])
    theirs = place.decoder.text(place.theirs[back : place.index + 512])
    if not opens_reasoning(ours) or not _near_start(ours):
        return False
    rest = without_reasoning(ours, unclosed=True).split()[:4]
    return bool(rest) and theirs.split()[: len(rest)] == rest


def _has_reasoning(text: str) -> bool:
    return opens_reasoning(text) or "</think>" in text


def _near_start(text: str) -> bool:
    return opens_reasoning(text[:160])


def _in_a_run(place: _Place) -> bool:
    """Whether the difference is in a run of one repeated id, of which one side has more than the other."""
    end = place.ours[max(0, place.index - _RUN) : place.index]
    if len(end) < _RUN or len(set(end)) != 1:
        return False
    ours = place.ours[place.index : place.index + 1]
    theirs = place.theirs[place.index : place.index + 1]
    return (ours == end[:1]) != (theirs == end[:1])


def _reasoning_is_the_difference(was: Any, now: Any) -> bool:
    if not reasoning_of(was) and not _has_reasoning(text_of(was)):
        return False
    fewer = not opens_reasoning(text_of(now)) and reasoning_of(now) in ("", reasoning_of(was))
    return (
        fewer
        and without_reasoning(text_of(was), unclosed=True).split() == text_of(now).split()
        and not same_arguments(was, now)
    )


# the earlier prompt is kept, the reply is not


def _in_reply(place: _Place) -> tuple[str, str]:
    if (found := _lost(place.before)) is not None:
        return found
    back, reply = place.sent_back, place.before.reply
    if back is not None and reply is not None and _calls(back) != _calls(reply):
        return "history_edited", "certain"
    found = _reply_by_text(place, place.decoder) if place.decoder is not None else None
    if found is not None and found[1] == "certain":
        return found
    if place.before.counted is not None and place.before.counted > len(place.before.sampled):
        return "engine_dropped_ids", "likely"  # engines count in ways of their own
    return found or _reply_by_messages(place)


def _calls(message: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Names and arguments of a message's tool calls; their ids say nothing to a model."""
    return [call[1:] for call in tool_calls(message)]


def _lost(before: CallView) -> tuple[str, str] | None:
    """What the call's own record says: ids that were not returned, or a reply that broke off."""
    if before.outcome in ("aborted", "truncated") or any(code in _CUT for code in before.codes):
        return "cut_reply", "certain"
    if any(code in _DROPPED for code in before.codes):
        return "engine_dropped_ids", "certain"
    return None


def _reply_by_text(place: _Place, decoder: TokenDecoder) -> tuple[str, str] | None:
    """What the text of the reply and of its new rendering show; None where that is not conclusive."""
    before = place.before
    sampled = place.ours[place.split :]
    body = _without_stop(sampled, decoder)
    theirs = place.theirs[place.split :]
    theirs = theirs[: _turn_end(theirs, set(body), decoder)]
    ours_text, their_text = decoder.text(body), decoder.text(theirs)
    stopped = len(body) < len(sampled)
    at = place.index - place.split
    if stopped and at >= len(body):
        return (
            ("template_after_stop", "certain")
            if not their_text[len(ours_text) :].strip()
            else ("history_edited", "likely")
        )
    if ours_text == their_text:
        # The same text in other tokens. Half a character at a cut end is not text.
        return ("cut_reply", "likely") if ours_text.endswith("\ufffd") else ("reply_retokenized", "certain")
    if _same_words(body, theirs, at, decoder):
        return "reply_retokenized", "certain"
    if (
        (opens_reasoning(ours_text) or "</think>" in ours_text)
        and not opens_reasoning(their_text)
        and "</think>" not in their_text
    ):
        same = without_reasoning(ours_text, unclosed=True).split() == their_text.split()
        return "reasoning_stripped", "certain" if same else "likely"
    if json_equal_texts(ours_text, their_text):
        return "arguments_reserialized", "certain"
    if not stopped and ours_text.startswith(their_text.rstrip()):
        return "cut_reply", "certain"
    if not stopped and ours_text.rstrip("\ufffd") != ours_text and their_text.startswith(ours_text.rstrip("\ufffd")):
        return "cut_reply", "certain"
    back, reply = place.sent_back, before.reply
    if back is None or reply is None:
        return ("reply_retokenized", "possible") if ours_text.split() == their_text.split() else None
    if text_of(back) != text_of(reply):
        return "history_edited", "certain" if text_of(back).split() != text_of(reply).split() else "likely"
    if (
        one_gap(ours_text, their_text)
        and text_of(reply).strip() in their_text
        and text_of(reply).strip() not in ours_text
    ):
        return "engine_dropped_ids", "certain"
    return None


def _same_words(ours: Sequence[int], theirs: Sequence[int], at: int, decoder: TokenDecoder) -> bool:
    """Whether both sides have the same text past the first tokens that differ: if something changed, it is further
    on.
    """
    same = len(decoder.text(ours[:at]))
    first = max(len(decoder.text(ids[: at + 1])) for ids in (ours, theirs))
    ours_text, other = decoder.text(ours), decoder.text(theirs)
    return first > same and len(ours_text) > first and ours_text[same : first + 1] == other[same : first + 1]


def _without_stop(sampled: Sequence[int], decoder: TokenDecoder) -> list[int]:
    """The sampled ids without the special tokens at their end."""
    end = len(sampled)
    while end and decoder.special(sampled[end - 1]):
        end -= 1
    return list(sampled[:end])


def _turn_end(ids: Sequence[int], own: set[int], decoder: TokenDecoder) -> int:
    """Where the re-rendered reply ends: at the first special token that the reply itself does not hold."""
    return next((n for n, token in enumerate(ids) if decoder.special(token) and token not in own), len(ids))


def _reply_by_messages(place: _Place) -> tuple[str, str]:
    """What a comparison of the reply with what was sent back shows, without a tokenizer but with the engine's own token
    texts.
    """
    before, back, reply = place.before, place.sent_back, place.before.reply
    at = place.index - place.split
    only_stop = at == len(before.sampled) - 1 and before.finish_reason in ("stop", "tool_calls")
    if back is None or reply is None:
        return ("template_after_stop", "possible") if only_stop else ("unknown", "possible")
    text = "".join(before.tokens or ())
    if not opens_reasoning(text_of(back)) and not reasoning_of(back) and (reasoning_of(reply) or opens_reasoning(text)):
        return "reasoning_stripped", "likely"
    got, sent = text_of(reply), text_of(back)
    if got != sent:
        if before.finish_reason == "length" and got.startswith(sent.rstrip()):
            return "cut_reply", "likely"
        return "history_edited", "certain" if got.split() != sent.split() else "likely"
    if same_arguments(reply, back):
        return "arguments_reserialized", "certain" if not got else "likely"
    if only_stop:
        return "template_after_stop", "likely"
    if text and got and got.strip() not in text:
        return "engine_dropped_ids", "likely"
    if before.finish_reason == "length" or (text and got and _stop_string_cut(text, got)):
        return "cut_reply", "likely"
    if calls_of(reply):
        rewritten = text and any(arguments not in text for _, arguments in calls_of(reply))
        return ("arguments_reserialized", "likely") if rewritten else ("reply_retokenized", "possible")
    return "reply_retokenized", "likely"


def _stop_string_cut(text: str, got: str) -> bool:
    """The engine sampled words after the text that the agent got: those of the stop string."""
    rest = text.partition(got)[2]
    return bool(rest.strip()) and not rest.strip().startswith("<")
