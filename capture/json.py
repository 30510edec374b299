"""JSON that others wrote: one rule for what strict JSON does not have.

Engines, agents and verifiers write JSON with Python or JavaScript, which also write NaN and infinities, halves of
surrogate pairs (`"\\ud83d"`), integers beyond 64 bits and nesting without a bound.

- Read what others wrote with `loads` (or `loads_or_none`): it reads all of these as what they say, and raises
  `JsonError` for the rest.
- Write what we store with `dumps`: always strict JSON that any reader takes, whatever an agent put into the value.
- Pass on what came in with `dumps_as_read`: halves of pairs and NaN go out as they came.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
import orjson

from capture.errors import JsonError

#: Levels of nesting that `dumps` writes. orjson writes 254.
MAX_DEPTH: Final = 200
TOO_DEEP: Final = "(nested too deeply to be stored)"
_decode: Final = msgspec.json.Decoder().decode


def loads_strict(data: bytes | str) -> Any:
    """The value of a strict JSON text, integers of any size kept exact. Raises `JsonError`, also for one that nests
    deeper than Python's recursion limit (about 1,000 levels).
    """
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise JsonError(str(error)) from None


def loads(data: bytes | str) -> Any:
    """The value of a JSON text, as Python writes it too: NaN, infinity, half a surrogate pair. Raises `JsonError`."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    try:
        return json.loads(data)
    except RecursionError:
        raise JsonError("nested too deeply") from None
    except ValueError as error:
        raise JsonError(str(error)) from None


def loads_or_none(data: bytes | str) -> Any:
    """The value of a JSON text; None for a text that is none."""
    try:
        return loads(data)
    except JsonError:
        return None


def dumps(value: Any, option: int = 0) -> bytes:
    """`value` as strict JSON in UTF-8; `option` is orjson's (`OPT_INDENT_2`, ...). Never fails for what `loads` gave.

    NaN and infinities become null, as in orjson. What strict JSON cannot hold is made into what it can, see `storable`.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return orjson.dumps(storable(value), option=option)


def storable(value: Any, depth: int = 0) -> Any:
    """`value` in a form that `orjson.dumps` takes.

    Halves of surrogate pairs are joined where they meet, else written as their escape (`storable_text`); integers
    beyond 64 bits keep their digits; what is nested deeper than `MAX_DEPTH` becomes `TOO_DEEP`; objects that are no
    JSON become their text.
    """
    if isinstance(value, dict | list | tuple) and depth > MAX_DEPTH:
        return TOO_DEEP
    if isinstance(value, dict):
        return {storable_text(str(name)): storable(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable(item, depth + 1) for item in value]
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(value))
    if value is None or isinstance(value, bool | int | float | orjson.Fragment):
        return value
    return storable_text(str(value))


def storable_text(text: str) -> str:
    """`text` as UTF-8 can hold it: two halves of a surrogate pair are one character again, a half without its other
    becomes the six characters of its escape, `\\ud83d`.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return whole.encode("utf-8", "backslashreplace").decode()
    return text


def dumps_as_read(value: Any) -> bytes:
    """`value` as Python writes it, for whoever wrote it so: NaN and halves of pairs go out again. Raises `JsonError`
    for a value that is nested too deeply.
    """
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except RecursionError:
        raise JsonError("nested too deeply") from None


def as_object(value: object) -> dict[str, Any]:
    """A JSON object; empty for anything else."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[dict[str, Any]]:
    """The objects of a JSON list; empty for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
