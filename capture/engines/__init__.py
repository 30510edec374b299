"""The engines whose answers we can read, one file each, and how to tell which one answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from capture.engines.base import Engine
from capture.engines.llamacpp import LlamaCpp
from capture.engines.meaning import LogprobMeaning
from capture.engines.sglang import SGLang
from capture.engines.vllm import VLLM
from capture.errors import CaptureError

#: Every engine that returns token ids, in the order in which an unknown address is asked. A new one is added here.
ENGINES: Final[tuple[type[Engine], ...]] = (VLLM, SGLang, LlamaCpp)

_BY_NAME: Final[dict[str, type[Engine]]] = {cls.name: cls for cls in ENGINES} | {Engine.name: Engine}
NAMES: Final = tuple(_BY_NAME)
#: Routes to ask an unknown engine, in this order, until `detect` knows it. `owned_by` of the models names the engine
#: also behind a gateway that hides its other routes.
IDENTITY_ROUTES: Final = (*(path for cls in ENGINES for path in cls.identity_routes), "/v1/models")


def engine(name: str) -> Engine:
    """The engine of that name, one of `NAMES`. Raises `CaptureError`."""
    try:
        return _BY_NAME[name]()
    except KeyError:
        raise CaptureError(f"unknown engine {name!r}; known are {', '.join(NAMES)}") from None


def tool_grammar(name: str | None) -> str | None:
    """What constrains the sampling of calls with tools on the engine of that name; None where nothing is known to."""
    return _BY_NAME.get(name or "", Engine).tool_grammar


def default_logprobs(name: str | None) -> LogprobMeaning:
    """What the logprobs of the engine of that name mean where it is started by default."""
    return _BY_NAME.get(name or "", Engine).logprobs


def detect(answers: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """`(name, version)` of an engine from the JSON of `IDENTITY_ROUTES`, by path; None while that is not enough."""
    for cls in ENGINES:
        found = cls.recognize(answers)
        if found is not None:
            return found
    models = answers.get("/v1/models")
    rows = models.get("data") if isinstance(models, dict) else None
    for row in rows if isinstance(rows, list) else ():
        owner = row.get("owned_by") if isinstance(row, dict) else None
        if owner in [cls.name for cls in ENGINES]:
            return str(owner), None
    return None
