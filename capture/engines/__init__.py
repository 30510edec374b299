"""The engines whose answers we can read, one file each, and how to tell which one answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capture.engines.base import Engine
from capture.engines.llamacpp import LlamaCpp
from capture.engines.sglang import SGLang
from capture.engines.vllm import VLLM
from capture.errors import CaptureError

_ENGINES: dict[str, type[Engine]] = {one.name: one for one in (VLLM, SGLang, LlamaCpp, Engine)}
NAMES = tuple(_ENGINES)


def engine(name: str) -> Engine:
    """The engine of that name: vllm, sglang, llamacpp or other. Raises `CaptureError`."""
    try:
        return _ENGINES[name]()
    except KeyError:
        raise CaptureError(f"unknown engine {name!r}; known are {', '.join(NAMES)}") from None


def detect(answers: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Name and version of an engine, from the JSON of its side routes by path; None while that is not enough.

    Ask in this order: `/version` (vLLM), `/get_model_info` and `/server_info` (SGLang), `/props` (llama.cpp),
    `/v1/models` (whose `owned_by` names the engine, also behind a gateway that hides the other routes).
    """
    version = answers.get("/version")
    if isinstance(version, dict) and isinstance(version.get("version"), str):
        return "vllm", version["version"]
    if isinstance(answers.get("/get_model_info"), dict) and "model_path" in answers["/get_model_info"]:
        info = answers.get("/server_info")
        if "/server_info" not in answers:
            return None
        found = info.get("version") if isinstance(info, dict) else None
        return "sglang", found if isinstance(found, str) else None
    props = answers.get("/props")
    if isinstance(props, dict) and ("default_generation_settings" in props or "build_info" in props):
        built = props.get("build_info")
        return "llamacpp", built if isinstance(built, str) else None
    models = answers.get("/v1/models")
    rows = models.get("data") if isinstance(models, dict) else None
    for row in rows if isinstance(rows, list) else ():
        owner = row.get("owned_by") if isinstance(row, dict) else None
        if owner in ("vllm", "sglang", "llamacpp"):
            return owner, None
    return None


def sampling_defaults(answers: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an engine samples with where a call sets nothing; None where it does not say.

    llama.cpp tells in `/props` (its defaults are not neutral: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05). vLLM
    0.32 and SGLang 0.5.23 take theirs from the model's generation_config.json and tell nobody; SGLang started with
    `--sampling-defaults openai` says that in `/server_info`, and they are then its own, which are neutral.
    """
    info = answers.get("/server_info")
    if isinstance(info, dict) and info.get("sampling_defaults") == "openai":
        return dict(_SGLANG_OWN)
    props = answers.get("/props")
    settings = props.get("default_generation_settings") if isinstance(props, dict) else None
    params = settings.get("params", settings) if isinstance(settings, dict) else None
    if not isinstance(params, dict):
        return None
    return {name: params[name] for name in _SAMPLING if name in params}


#: `ChatCompletionRequest._DEFAULT_SAMPLING_PARAMS` of SGLang 0.5.23.
_SGLANG_OWN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty",
    "dynatemp_range", "mirostat", "xtc_probability", "dry_multiplier", "samplers",
)  # fmt: skip
