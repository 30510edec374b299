"""Removes from an engine's answer what the agent did not ask for, so that the capture is invisible to it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from capture.chat.assemble import ID_KEYS, NESTED, SAMPLED_IDS, without_ids

_WITH_IDS: Final = ID_KEYS | NESTED
_SAMPLED: Final = (*SAMPLED_IDS, *NESTED)
_EXT_KEYS: Final = ("input_ids", "output_ids")


class ResponseFilter(NamedTuple):
    """What the agent did not ask for, and so does not get.

    `nulls` are keys that are null in an answer where nothing was asked for: they are set to null. Other hidden keys are
    removed.
    """

    logprobs: bool = True
    prompt: bool = True
    sampled: bool = True
    usage: bool = True
    nulls: frozenset[str] = frozenset()
    #: Keys of a choice, beside ids and logprobs, that came because of what we asked for.
    more: frozenset[str] = frozenset()

    def strip(self, body: dict[str, Any], *, streamed: bool) -> bool:
        """Removes it from a chunk or a whole body, in place; returns whether anything was removed."""
        changed = self._strip_ids(body)
        ext = body.get("sglext")
        if isinstance(ext, dict):
            left = {name: value for name, value in ext.items() if not self._hides_ext(name)}
            changed |= len(left) < len(ext)
            body["sglext"] = left
            if not left:
                del body["sglext"]
        choices = body.get("choices")
        for part in choices if isinstance(choices, list) else ():
            if not isinstance(part, dict):
                continue
            if self.logprobs and part.get("logprobs") is not None:
                changed |= self._mute(part, "logprobs")
            for key in self.more.intersection(part):
                del part[key]
                changed = True
            changed |= self._strip_ids(part)
        if self.usage and streamed and body.get("usage") is not None:
            del body["usage"]
            changed = True
        return changed

    def is_ours(self, chunk: dict[str, Any], *, steps: bool) -> bool:
        """Whether a chunk exists only because of what we added: counts, ids, and where `steps` one without text.

        One with anything that the agent asked for is the agent's. vLLM (0.32) itself sends no chunk for a step whose
        text a tool parser holds back, and so loses its logprobs; with ours the agent gets them.
        """
        choices = chunk.get("choices")
        if not choices:
            ext, usage = chunk.get("sglext"), isinstance(chunk.get("usage"), dict)
            if isinstance(ext, dict) and any(not self._hides_ext(name) for name in ext):
                return False
            return self.usage if usage else isinstance(ext, dict)
        if not isinstance(choices, list) or not steps:
            return False
        for choice in choices:
            if not isinstance(choice, dict) or choice.get("finish_reason") is not None:
                return False
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                return False
            for value in delta.values():
                if value is not None:
                    return False
        return not self._asked_for(chunk) and not any(map(self._asked_for, choices))

    def _asked_for(self, place: dict[str, Any]) -> bool:
        """Whether a chunk or a choice has ids or logprobs that the agent asked for."""
        if not self.logprobs and place.get("logprobs"):
            return True
        if not self.prompt and place.get("prompt_token_ids"):
            return True
        return not self.sampled and any(place.get(key) for key in _SAMPLED)

    def _strip_ids(self, place: dict[str, Any]) -> bool:
        changed = False
        if _WITH_IDS.isdisjoint(place):
            return changed
        for key in _WITH_IDS.intersection(place):
            if key in NESTED:
                if isinstance(place[key], dict):
                    left = without_ids(place[key]) if self.prompt and self.sampled else place[key]
                    changed |= len(left) < len(place[key])
                    place[key] = left
            elif self.prompt if key == "prompt_token_ids" else self.sampled:
                changed |= self._mute(place, key)
        return changed

    def _mute(self, place: dict[str, Any], key: str) -> bool:
        if key in self.nulls:
            if place[key] is None:
                return False
            place[key] = None
        else:
            del place[key]
        return True

    def _hides_ext(self, name: str) -> bool:
        return name in _EXT_KEYS and (self.prompt if name == "input_ids" else self.sampled)
