"""Which task of a rollout service a prompt means: trainers hand over a row's prompt, and nothing else of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from train.errors import BadInput
from train.rollouts.messages import NotChat, text_of


class TaskChoice:
    """The service's tasks by name and by prompt."""

    def __init__(self, tasks: Iterable[Mapping[str, Any]]) -> None:
        self.names = [str(task["name"]) for task in tasks]
        self._by_prompt: dict[str, list[str]] = {}
        for task in tasks:
            self._by_prompt.setdefault(str(task.get("prompt") or "").strip(), []).append(str(task["name"]))

    def find(self, prompt: object) -> str | None:
        """The task whose name, or whose prompt, is the prompt's text (the last user message's); None for another text.

        None as well for a prompt that several tasks have.
        """
        text = prompt_text(prompt)
        if text in self.names:
            return text
        found = self._by_prompt.get(text, []) if text else []
        return found[0] if len(found) == 1 else None

    def named(self, prompt: object) -> str:
        """`find`, where there is nothing else to go by. Raises `BadInput`."""
        found = self.find(prompt)
        if found is None:
            names = ", ".join(self.names[:5]) + (", ..." if len(self.names) > 5 else "")
            raise BadInput(
                f"no task of the service has the prompt {prompt_text(prompt)[:80]!r}: the data set's prompts must be "
                f"tasks' names or prompts, as RolloutService.tasks() has them ({names})"
            )
        return found


def prompt_text(prompt: object) -> str:
    """The text of a prompt: itself, or the last user message of a conversation."""
    if isinstance(prompt, str):
        return prompt.strip()
    if not isinstance(prompt, list):
        return ""
    user_messages = [message for message in prompt if isinstance(message, dict) and message.get("role") == "user"]
    try:
        return text_of(user_messages[-1].get("content")).strip() if user_messages else ""
    except NotChat:
        return ""
