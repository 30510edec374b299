"""The formats that `bench train convert` writes, one file per format.

To add one: write a module with `FORMAT`, a `Format`, and add its name to `NAMES`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

from train.errors import BadInput

if TYPE_CHECKING:
    from train.rows.formats.base import Format

#: In the order in which they are offered; the module of each has its name, with _ for -.
NAMES: Final = ("prime-sft", "trl-sft", "verl-sft", "skyrl-sft", "openenv-episodes", "trl-sft-ids", "trl-grpo")


@cache
def find_format(name: str) -> Format:
    """The format of that name. Raises `BadInput`."""
    if name not in NAMES:
        listed = ", ".join(f"'{known}'" for known in NAMES[:-1])
        raise BadInput(f"--format must be {listed} or '{NAMES[-1]}', not '{name}'")
    found: Format = import_module(f"train.rows.formats.{name.replace('-', '_')}").FORMAT
    return found
