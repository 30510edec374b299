"""Real chat templates (those that come inside TRL) with a small real tokenizer (SmolLM2's), and an engine's tokenizer
routes around them.

`RenderingDouble` is a double: it answers `/tokenize` and `/detokenize` in the shapes of vLLM 0.32, and renders as vLLM
does, but it is no engine. The real ones stand in `tests/live/test_token_in.py`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from tests.train.smollm import smollm

OURS = Path(__file__).parents[1] / "sandbox/tools_template.jinja"


@dataclass(frozen=True)
class Kind:
    """What a template's model does: the stop tokens it samples, after a text and after a tool call; whether it takes
    arguments as a string; whether it knows tools and a system prompt.
    """

    stop: str
    tool_stop: str | None = None
    string_arguments: bool = False
    tools: bool = True
    system: bool = True


CHATML = Kind("<|im_end|>")
DEEPSEEK = Kind("<｜end▁of▁sentence｜>", string_arguments=True)
TEMPLATES: dict[str, Kind] = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_training": CHATML,
    "qwen3_instruct_2507": CHATML,
    "qwen3_5_think": CHATML,
    "llama3": Kind("<|eot_id|>", tools=False),
    "llama3_1": Kind("<|eot_id|>"),
    "gemma3": Kind("<end_of_turn>", tools=False),
    "gemma4_v5": Kind("<turn|>", tool_stop="<|tool_response>"),
    "phi3": Kind("<|end|>", tools=False),
    "deepseekv3": DEEPSEEK,
    "glm4moe": Kind("<|user|>", tool_stop="<|observation|>"),
    "gptoss": Kind("<|return|>", tool_stop="<|call|>"),
    "cohere2": Kind("<|END_OF_TURN_TOKEN|>", tools=False),
    "lfm2_v2": CHATML,
    "nemotron_3_nano": CHATML,
}

_SPECIAL = re.compile(
    r"<[|｜][\w▁ .:]+[|｜]>|<[|]\w+>|<\w+[|]>|\[gMASK\]|<sop>|<bos>"
    r"|</?(?:think|tool_call|tool_response|tools|start_of_turn|end_of_turn)>"
)


def source(name: str) -> str:
    """The template's text: one of TRL's, or the one that our real engines serve (`engines`)."""
    if name == "engines":
        return OURS.read_text()
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps trl"
    return (Path(next(iter(spec.submodule_search_locations))) / f"chat_templates/{name}.jinja").read_text()


@cache
def tokenizer() -> Tokenizer:
    """SmolLM2's with every template's special tokens, each one id."""
    made = Tokenizer.from_str(smollm().to_str())
    found = {token for name in TEMPLATES for token in _SPECIAL.findall(source(name))} | {"<BOS>", "<EOS>"}
    found |= {token for kind in TEMPLATES.values() for token in (kind.stop, kind.tool_stop) if token}
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in sorted(found)])
    return made


class ChatTemplate:
    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = TEMPLATES.get(name, CHATML)

    @cached_property
    def _compiled(self) -> Any:
        return _compile_jinja_template(source(self.name))

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, *, to_be_answered: bool, **kwargs: Any) -> str:
        return str(
            self._compiled.render(
                messages=[self._plain_message(message) for message in messages],
                tools=tools,
                add_generation_prompt=to_be_answered,
                bos_token="<BOS>",
                eos_token="<EOS>",
                **kwargs,
            )
        )

    def _plain_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """As vLLM hands a message to a template: content is a text, arguments are parsed."""
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        made = {**message, "content": content}
        for name in ("reasoning", "reasoning_content"):
            if made.get(name) is None:
                made.pop(name, None)
        if not message.get("tool_calls"):
            made.pop("tool_calls", None)
            return made
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return made

    def _arguments(self, value: Any) -> Any:
        if self.kind.string_arguments:
            return value if isinstance(value, str) else json.dumps(value)
        return json.loads(value) if isinstance(value, str) else value

    def stop(self, message: dict[str, Any]) -> str:
        """The stop token that the model samples after this message."""
        return (message.get("tool_calls") and self.kind.tool_stop) or self.kind.stop

    def stop_id(self, message: dict[str, Any]) -> int:
        found = tokenizer().token_to_id(self.stop(message))
        assert found is not None
        return found


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def decode(ids: Sequence[int]) -> str:
    return tokenizer().decode(list(ids), skip_special_tokens=False)


class RenderingDouble:
    """Stands for `proxy.replicas.Replica` where only the tokenizer routes are asked."""

    label = "replica-0"

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.asked: list[str] = []

    async def get_json(self, path: str, *, method: str = "GET", body: Any = None) -> Any:
        self.asked.append(path)
        return self.answer(path, orjson.loads(orjson.dumps(body)))

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/detokenize":
            return {"prompt": decode(body["tokens"])}
        try:
            text = self.template.render(
                body["messages"],
                body.get("tools"),
                to_be_answered=body["add_generation_prompt"],
                **(body.get("chat_template_kwargs") or {}),
            )
        except Exception:  # as an engine: a template that refuses is an error
            return None
        ids = encode(text)
        return {"tokens": ids, "count": len(ids), "max_model_len": 8192}
