"""A model's own tokenizer and chat template, and how a row comes out of them: its ids, and which of them train."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from train.errors import BadInput
from train.extras import optional
from train.rollouts.messages import Message

NEEDED_FOR: Final = "tokenizer validation requires the benchflow train or trl extra"


class RenderError(Exception):
    """The template refused a row; the text is the template's."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as a trainer sees it: its `ids`, and how many of them are trained.

    `boundary` is False where the rendering does not begin with the prompt and the header of the reply: a trainer that
    cuts there trains something else.
    """

    ids: list[int]
    trainable: int
    boundary: bool = True


class Template:
    """The tokenizer and chat template of a folder or a model's name, through transformers, as in trainers.

    transformers works without torch here, and takes about a second to import. With jinja2 and tokenizers alone, we
    would have to keep up with what transformers passes to templates.
    """

    def __init__(self, name: str, revision: str | None = None) -> None:
        """`revision` is that of a model on the Hub.

        Raises `BadInput` where the extra is missing, and for a name without a tokenizer or a chat template.
        """
        logging.getLogger("transformers").setLevel(logging.ERROR)
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # torch is not needed here
        self._refusal: type[Exception] = optional("jinja2", "TemplateError", needed_for=NEEDED_FOR, extra="train")
        tokenizers = optional("transformers", "AutoTokenizer", needed_for=NEEDED_FOR, extra="train")
        try:
            self._tokenizer: Any = tokenizers.from_pretrained(name, revision=revision or "main")
        except Exception as error:  # no such folder, no network, files of an unknown version, and more
            what = "a folder with tokenizer.json" if Path(name).exists() else "a folder, or a model's name on the Hub"
            raise BadInput(f"no tokenizer at {name}: give {what} ({_first_line(error)})") from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise BadInput(
                f"the tokenizer at {name} has no chat template; give the folder of the model that was served"
            )

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The rendered text; with `generation_prompt` it ends where a reply begins. Raises `RenderError`."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **kwargs,
            )
        except self._refusal as error:
            raise RenderError(_first_line(error)) from error
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
        ) as error:  # a template that concatenates a null, for example
            raise RenderError(f"{type(error).__name__}: {_first_line(error)}") from error
        return text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any], kwargs: Mapping[str, Any], *, last_only: bool
    ) -> Rendered:
        """A conversation as ids. With `last_only` only the last reply is trained, else each. Raises `RenderError`."""
        whole = self.text(messages, tools, kwargs)
        replies = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
        trainable, boundary = 0, True
        for at in replies[-1:] if last_only else replies:
            before = self.text(messages[:at], tools, kwargs, generation_prompt=True) if at else ""
            after = whole if at == len(messages) - 1 else self.text(messages[: at + 1], tools, kwargs)
            if not after.startswith(before):
                boundary = False
                continue
            trainable += len(self.ids(after[len(before) :]))
        return Rendered(self.ids(whole), trainable, boundary)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
