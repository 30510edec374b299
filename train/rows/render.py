"""A model's own tokenizer and chat template, and how a row comes out of them: its ids, and which of them train."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from train.errors import BadInput
from train.rollouts.messages import Message

MISSING = "tokenizer validation requires the benchflow train or trl extra"
HOW_TO_INSTALL = "pip install -e '.[train]' in a clone of benchflow-sidecar"


class RenderError(Exception):
    """The template refused a row; the text is the template's."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as a trainer sees it: the `ids` of all of it, and how many of them train.

    `boundary` is False where the prompt, with the header of the reply, is no beginning of the whole: then a trainer
    that cuts there trains something else.
    """

    ids: list[int]
    trainable: int
    boundary: bool = True


class Template:
    """The tokenizer of a folder or of a model's name, through transformers: trainers render with the same code.

    transformers without torch is enough, and takes about a second to import; a template of its own (jinja2 and
    tokenizers alone) would have to be kept equal to what transformers gives templates.
    """

    def __init__(self, name: str) -> None:
        """Raises `BadInput`: the extra is missing, no such tokenizer, no chat template."""
        try:
            logging.getLogger("transformers").setLevel(logging.ERROR)
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch is no matter here
            refusal = import_module("jinja2").TemplateError
            tokenizers = import_module("transformers").AutoTokenizer
        except ModuleNotFoundError as error:
            raise BadInput(f"{MISSING}: {HOW_TO_INSTALL}") from error
        self._refusal: type[Exception] = refusal
        try:
            self._tokenizer: Any = tokenizers.from_pretrained(name)
        except Exception as error:  # of many kinds: no such folder, no network, files of a version it does not know
            what = "a folder with tokenizer.json" if Path(name).exists() else "a folder, or a model's name on the Hub"
            raise BadInput(f"no tokenizer at {name}: give {what} ({_first_line(error)})") from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise BadInput(
                f"the tokenizer at {name} has no chat template; give the folder of the model that was served"
            )

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any], kwargs: Mapping[str, Any], *, ask: bool = False
    ) -> str:
        """The rendered text; with `ask` it ends where a reply begins. Raises `RenderError`."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=ask, **kwargs
            )
        except self._refusal as error:
            raise RenderError(_first_line(error)) from error
        except (TypeError, ValueError, KeyError, AttributeError) as error:  # what a template does to a null, for one
            raise RenderError(f"{type(error).__name__}: {_first_line(error)}") from error
        return text

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any], kwargs: Mapping[str, Any], *, last_only: bool
    ) -> Rendered:
        """A conversation as ids. `last_only`: only the last reply trains, else each. Raises `RenderError`."""
        whole = self.text(messages, tools, kwargs)
        replies = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
        trainable, boundary = 0, True
        for at in replies[-1:] if last_only else replies:
            before = self.text(messages[:at], tools, kwargs, ask=True) if at else ""
            after = whole if at == len(messages) - 1 else self.text(messages[: at + 1], tools, kwargs)
            if not after.startswith(before):
                boundary = False
                continue
            trainable += len(self.ids(after[len(before) :]))
        return Rendered(self.ids(whole), trainable, boundary)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
