"""Which model and where: reads `-m vllm/my-policy` and the `BENCHFLOW_PROVIDER_*` variables for this host's proxy."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

import capture.engines
from capture.engines.base import Engine
from proxy import TOKEN_LOGPROBS, SettingsError, read_capture, read_top_logprobs
from sandbox.errors import JobError

#: Prefix of `-m` -> the engine's name for the proxy. Hosted APIs are recorded without tokens.
ENGINES = {cls.name: cls.name for cls in capture.engines.ENGINES} | {"openai": Engine.name}
#: For people: vllm/NAME, ... or openai/NAME.
MODEL_FORMS = " or ".join((", ".join(f"{prefix}/NAME" for prefix in list(ENGINES)[:-1]), f"{list(ENGINES)[-1]}/NAME"))
BASE_URL, API_KEY = "BENCHFLOW_PROVIDER_BASE_URL", "BENCHFLOW_PROVIDER_API_KEY"
HOSTED = "https://api.openai.com/v1"


@dataclass(frozen=True)
class Provider:
    """An engine as this host reaches it. Neither address nor key enters a sandbox."""

    #: As given with `-m`.
    model: str
    engine: str
    #: The name under which the engine serves it.
    served: str
    base_url: str
    api_key: str | None
    capture: bool
    #: Alternatives per token that are recorded too.
    top_logprobs: int | None = None

    @property
    def secrets(self) -> list[str]:
        return [value for value in (self.base_url, self.base_url.removesuffix("/v1"), self.api_key) if value]


def read_provider(model: str | None, env: Mapping[str, str]) -> Provider:
    """The provider of `-m MODEL` and the variables of `--agent-env`. Raises `JobError`."""
    if not model:
        raise JobError(f"this agent needs a model; give -m {MODEL_FORMS}")
    prefix, slash, served = model.partition("/")
    if slash and not (prefix and served):
        raise JobError(f"-m {model}: the name of the {'model' if prefix else 'engine'} is missing; give {MODEL_FORMS}")
    if not slash or prefix not in ENGINES:
        near = difflib.get_close_matches(prefix, ENGINES, n=1) if slash else []
        meant = f"{near[0]}/{served}" if near else f"vllm/{model}"
        raise JobError(f"-m {model}: say which engine serves it, such as -m {meant} ({', '.join(ENGINES)})")
    base = env.get(BASE_URL) or (HOSTED if prefix == "openai" else "")
    if not base:
        raise JobError(f"where does {model} run? Give --agent-env {BASE_URL}=http://HOST:8000/v1")
    if not base.startswith(("http://", "https://")):
        raise JobError(f"{BASE_URL}={base} is no address; give one such as http://{base.partition('/')[0]}/v1")
    key = env.get(API_KEY) or (os.environ.get("OPENAI_API_KEY") if prefix == "openai" else None)
    try:
        # A hosted API is not asked for tokens; with capture on, each call's record says that it returns none.
        capture, top_logprobs = read_capture(env, default=prefix == "openai"), read_top_logprobs(env)
    except SettingsError as error:
        raise JobError(str(error)) from error
    return Provider(model, ENGINES[prefix], served, base.rstrip("/"), key or None, capture, top_logprobs)


def without_tokens(provider: Provider) -> str | None:
    """A warning before a job whose calls will have no token ids; afterwards it is too late."""
    if provider.engine == "other":
        return (
            f"{provider.model} is called as a hosted API, which returns no token ids: its calls are recorded with text "
            "and usage only; serve the model with vLLM, SGLang or llama.cpp to capture its tokens"
        )
    if provider.capture:
        return None
    return f"this job's calls are recorded without token ids and logprobs; --agent-env {TOKEN_LOGPROBS}=1 captures them"


def check_reachable(provider: Provider, timeout: float = 10.0) -> None:
    """Calls `GET /models`, so that a job without an engine ends at once. Raises `JobError`."""
    headers = {"Authorization": f"Bearer {provider.api_key}"} if provider.api_key else {}
    try:
        answer = httpx.get(f"{provider.base_url}/models", headers=headers, timeout=timeout, trust_env=False)
    except httpx.HTTPError as error:
        raise JobError(
            f"no engine answers at {provider.base_url} ({type(error).__name__}); start it, or correct {BASE_URL}"
        ) from error
    if answer.status_code in (401, 403):
        raise JobError(f"the engine at {provider.base_url} refuses the key; correct {API_KEY}")
    rows = _rows(answer)
    names = [str(row["id"]) for row in rows if "id" in row]
    if names and provider.served not in names:
        raise JobError(
            f"the engine at {provider.base_url} serves {', '.join(names)}, not {provider.served}; correct -m"
        )
    # Engines name themselves here. Asked as another engine is, they return no ids, and the job would be useless.
    owner = next((str(row.get("owned_by")) for row in rows if row.get("id") == provider.served), None)
    known = provider.engine if provider.capture else "other"
    if known != "other" and owner in ENGINES and ENGINES[owner] not in (known, "other"):
        raise JobError(
            f"the engine at {provider.base_url} is {owner}, not {provider.engine}; give -m {owner}/{provider.served}"
        )


def _rows(answer: httpx.Response) -> list[dict[str, Any]]:
    try:
        rows = answer.json().get("data") or []
    except (ValueError, AttributeError):
        return []
    return (
        [row for row in rows if isinstance(row, dict)] if answer.status_code == 200 and isinstance(rows, list) else []
    )


def refuse_leak(provider: Provider, env: Mapping[str, str]) -> None:
    """Raises `JobError` when a variable for the sandbox holds the engine's address or key."""
    for name, value in env.items():
        for secret in provider.secrets:
            if len(secret) > 3 and secret in value:
                raise JobError(
                    f"the variable {name} would carry the engine's address or key into the sandbox; leave it out: "
                    "agents reach the model through the proxy"
                )
