"""The one reader of the `BENCHFLOW_CAPTURE_*` variables."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.errors import SettingsError
from proxy.settings import check_top_logprobs

TOKEN_LOGPROBS, TOP_LOGPROBS = "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS", "BENCHFLOW_CAPTURE_TOP_LOGPROBS"


def read_capture(environ: Mapping[str, str], *, default: bool) -> bool:
    """Whether `BENCHFLOW_CAPTURE_TOKEN_LOGPROBS` turns capture on; `default` when unset, empty or `auto`.

    Raises `SettingsError` for any other word than 1/true/yes/on and 0/false/no/off.
    """
    value = environ.get(TOKEN_LOGPROBS, "").strip().lower()
    if value in ("", "auto"):
        return default
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise SettingsError(f"{TOKEN_LOGPROBS} must be 1 or 0, not {value!r}")


def read_top_logprobs(environ: Mapping[str, str]) -> int | None:
    """`BENCHFLOW_CAPTURE_TOP_LOGPROBS`, alternatives per token; None when unset. Raises `SettingsError`."""
    value = environ.get(TOP_LOGPROBS, "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdigit()):
        raise SettingsError(f"{TOP_LOGPROBS} must be a whole number, not {value!r}")
    number = int(value[:9])  # Python reads no more than 4300 digits
    check_top_logprobs(number)
    return number
