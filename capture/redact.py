"""Secrets out of what is stored: known key fields are replaced, model text never.

Text that a model read or wrote stays as it is, so that text and token ids agree; where it holds what looks like a
secret the record says so (`secrets_seen`), and replacing it is the exporter's choice.
"""

from __future__ import annotations

import re
from typing import Any, Final

REDACTED: Final = "***REDACTED***"

#: Names of fields that hold a secret by themselves. `token`, `tokens` and `token_ids` are the field's own words.
_SECRET_FIELDS: Final = frozenset(
    "api_key apikey api-key x-api-key x_api_key authorization proxy-authorization password passwd secret client_secret "
    "access_token refresh_token id_token auth_token bearer_token private_key access_key secret_key account_key "
    "master_key encryption_key credentials cookie set-cookie".split()
)
#: Below these fields stands what the model read or wrote, or what the engine said of its tokens.
_TEXT_FIELDS: Final = frozenset(
    "messages content text prompt input arguments logprobs top_logprobs tokens tools functions instructions "
    "token_capture reasoning reasoning_content".split()
)
_URL_USER: Final = re.compile(r"(?<=://)[^/\s@:]{1,200}:[^/\s@]{1,200}(?=@)")
_URL_QUERY: Final = re.compile(
    r"(?<=[?&])((?:api[_-]?key|access_token|password|signature|sig|token|secret)=)[^&\s\"']{1,2000}", re.I
)

#: Each kind of secret: a word that must stand in the text for it to be worth a search, and its pattern (bounded).
_KINDS: Final = (
    ("private_key", "PRIVATE KEY", re.compile(r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----")),
    ("openai_key", "sk-", re.compile(r"\bsk-[A-Za-z0-9_-]{12,200}")),
    ("google_key", "AIzaSy", re.compile(r"\bAIzaSy[A-Za-z0-9_-]{20,60}")),
    ("aws_key", "IA", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    ("github_token", "gh", re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,100}|github_pat_[A-Za-z0-9_]{20,100})")),
    ("slack_token", "xox", re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,200}")),
    ("huggingface_token", "hf_", re.compile(r"\bhf_[A-Za-z0-9]{20,100}")),
    ("provider_key", "_", re.compile(r"\b(?:gsk_|r8_|fw_|dtn_)[A-Za-z0-9]{20,100}")),
    ("xai_key", "xai-", re.compile(r"\bxai-[A-Za-z0-9]{20,100}")),
    ("jwt", "eyJ", re.compile(r"\beyJ[A-Za-z0-9_-]{10,1000}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{5,1000}")),
)


def redact(value: Any) -> Any:
    """`value` with secrets of known fields and of addresses replaced; the same object where nothing was."""
    return _redact(value, in_text=False)


def _redact(value: Any, *, in_text: bool) -> Any:
    if isinstance(value, dict):
        changed: dict[Any, Any] | None = None
        for name, item in value.items():
            key = name.lower() if isinstance(name, str) else name
            if in_text:
                continue
            if key in _SECRET_FIELDS and isinstance(item, str) and item:
                new: Any = REDACTED
            else:
                new = _redact(item, in_text=key in _TEXT_FIELDS)
            if new is not item:
                changed = changed if changed is not None else dict(value)
                changed[name] = new
        return value if changed is None else changed
    if isinstance(value, list):
        if in_text:
            return value
        new_items = [_redact(item, in_text=False) for item in value]
        return new_items if any(a is not b for a, b in zip(new_items, value, strict=True)) else value
    if isinstance(value, str) and not in_text:
        return redact_url(value)
    return value


def redact_url(text: str) -> str:
    """An address, or a text with addresses in it, without user, password and secret query parameters."""
    if "://" not in text and "=" not in text:
        return text
    new = _URL_QUERY.sub(lambda found: found[1] + REDACTED, _URL_USER.sub(REDACTED, text))
    return text if new == text else new


def redact_text(text: str) -> str:
    """A text with everything that looks like a secret replaced: for exporters that are asked to."""
    for _, hint, pattern in _KINDS:
        if hint in text:
            text = pattern.sub(REDACTED, text)
    return redact_url(text)


def secrets_seen(value: Any) -> list[str]:
    """The kinds of secrets that seem to stand in the texts of `value`, sorted."""
    seen: set[str] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            for kind, hint, pattern in _KINDS:
                if hint in item and kind not in seen and pattern.search(item):
                    seen.add(kind)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return sorted(seen)
