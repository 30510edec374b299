"""A request's target: the session that its path names, and the route that it means."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

import httptools

_SESSION = re.compile(r"/s/([^/]+)(/.*|$)", re.DOTALL)
_DOUBLED = re.compile(r"^(?:/v1)+(?=/v1)")
_FORGIVEN = ("/chat/completions", "/completions", "/models", "/messages", "/responses")


class Target(NamedTuple):
    """`session` is the name in `/s/<session>/v1/…`, `path` what is behind it, as the routes have it."""

    session: str | None
    path: str
    query: bytes


def parse_target(target: bytes) -> Target | None:
    """Forgives `/v1/v1`, doubled and trailing slashes, a missing `/v1`. None for what is no path."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return None
    if url.path is None:
        return None
    session = None
    path = re.sub(r"/{2,}", "/", unquote(url.path.decode("latin-1")))
    named = _SESSION.match(path)
    if named:
        session, path = named[1], named[2]
    path = _DOUBLED.sub("", path.rstrip("/") or "/")
    if path.startswith(_FORGIVEN):
        path = "/v1" + path
    return Target(session, path, url.query or b"")
