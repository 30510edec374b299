"""Optional packages: imported where they are needed, with a sentence where they are missing or broken."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from train.errors import BadInput


def optional(
    module: str, attribute: str | None = None, *, needed_for: str, extra: str = "", install: str | None = None
) -> Any:
    """The module, or an attribute of it. `needed_for` begins the sentence, as in "Parquet needs the train extra".

    `install` says what to do where the package belongs to no extra of ours.

    Raises `BadInput` where the package is not installed, and where importing it fails in any way: compiled packages
    raise whatever their own dependencies do, and lazy ones only when an attribute is asked for.
    """
    install = install or f"pip install -e '.[{extra}]' in a clone of benchflow-sidecar"
    try:
        found = import_module(module)
        return found if attribute is None else getattr(found, attribute)
    except ModuleNotFoundError as error:
        if error.name is not None:  # a lazy package names none, and has the cause in words
            raise BadInput(f"{needed_for} ({error.name} is missing): {install}") from error
        raise _broken(module, error, needed_for, install) from error
    except Exception as error:
        raise _broken(module, error, needed_for, install) from error


def _broken(module: str, error: Exception, needed_for: str, install: str) -> BadInput:
    message = (str(error).strip().splitlines() or ["no message"])[0][:200]
    return BadInput(
        f"{needed_for} ({module} is installed but cannot be imported: {type(error).__name__}: {message}): {install}"
    )
