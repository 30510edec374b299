"""SkyRL's own functions on skyrl-sft rows: skyrl_steps.py ROWS WEIGHTS TEMPLATE. Prints one JSON object at the end.

Its module imports a server stack and, on Python 3.11, fails in pydantic; the functions that read rows need none of it
and are taken from its source as they stand.
"""

import ast
import enum
import functools
import importlib.util
import json
import logging
import sys
from pathlib import Path
from typing import Any, Optional

from datasets import load_dataset
from transformers import AutoTokenizer

WANTED = {
    "TrainOnWhat", "_normalize_tools", "_parse_tools", "_normalize_tool_call_payload", "_normalize_chat_messages",
    "_NORMALIZED_KEYS", "tokenize_chat_example",
}  # fmt: skip

source = Path(importlib.util.find_spec("skyrl").submodule_search_locations[0], "train/sft_trainer.py").read_text()
defined: dict[str, Any] = {
    "json": json, "Any": Any, "Optional": Optional, "logger": logging.getLogger(), "enum": enum, "Enum": enum.Enum,
    "functools": functools,
    "StrEnum": enum.StrEnum,
}  # fmt: skip


class TrainOnWhat(str, enum.Enum):  # noqa: UP042 - SkyRL's own, from its configuration
    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"


defined["TrainOnWhat"] = TrainOnWhat
for node in ast.parse(source).body:
    functions = isinstance(node, ast.FunctionDef)
    constants = isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets)
    if functions or constants:
        try:
            exec(compile(ast.Module([node], []), "sft_trainer.py", "exec"), defined)
        except NameError:  # needs what was left out
            continue

tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
with open(sys.argv[3]) as file:
    tokenizer.chat_template = file.read()
rows = load_dataset("json", data_files=sys.argv[1], split="train")
normal = [defined["_normalize_chat_messages"](row["messages"]) for row in rows]
report = {"rows": len(rows), "messages": normal}
try:
    made = [defined["tokenize_chat_example"](dict(row), tokenizer, max_length=8192) for row in rows]
    report["actions"] = [row["num_actions"] for row in made]
except Exception as error:
    report["tokenize_chat_example"] = f"{type(error).__name__}: {error}"
print("\n" + json.dumps(report))
