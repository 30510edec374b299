"""The keys that open sessions: their form, where a request has them, and which requests need none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from urllib.parse import urlsplit

from proxy.settings import is_loopback

#: What the keys of opened sessions begin with.
KEY = "sk-capture-"


def keys(headers: list[tuple[bytes, bytes]]) -> Iterator[str]:
    """The keys that a request offers, in the order of its headers."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip().decode("latin-1")
        elif name in (b"x-api-key", b"x-goog-api-key"):
            yield value.strip().decode("latin-1")


def digest(key: str) -> bytes:
    """Keys are found by their digest, so that the time of a look-up reveals nothing about them."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def from_a_page(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a browser sends this for a page that is not of this machine: any site could, also by a name of its own
    that leads here, and an open proxy asks for no key. Editors' own windows have other schemes."""
    if any(name == b"sec-fetch-site" and value == b"cross-site" for name, value in headers) and not any(
        name == b"origin" for name, _ in headers
    ):
        return True  # an image or a link: a browser names no origin for those
    origin = next((value.decode("latin-1") for name, value in headers if name == b"origin"), None)
    if origin is None or not origin.startswith(("http:", "https:", "null")):
        return False
    try:
        return not is_loopback(urlsplit(origin).hostname or "")
    except ValueError:
        return True
