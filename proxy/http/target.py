"""A request's target: the session that its path names, and its route."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

import httptools

_SESSION = re.compile(r"/s/([^/]+)(/.*|$)", re.DOTALL)
#: A template such as `/s/{name}/v1` without its name; the doubled slash must not make a session of `v1`.
_NAMELESS = re.compile(r"/+s(/*$|/{2,}|/v1(?:/|$))")
_REPEATED_V1 = re.compile(r"^(?:/v1)+(?=/v1)")
_WITHOUT_V1 = ("/chat/completions", "/completions", "/models", "/messages", "/responses")


class Target(NamedTuple):
    """`session` is the name in `/s/<session>/v1/…`, empty where none is there; `path` what is behind it, as the routes
    have it.
    """

    session: str | None
    path: str
    query: bytes


def parse_target(target: bytes) -> Target | None:
    """Accepts `/v1/v1`, doubled and trailing slashes, and a missing `/v1`. None for a target that is no path."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return None
    if url.path is None:
        return None
    session = None
    given = unquote(url.path.decode("latin-1"))
    path = re.sub(r"/{2,}", "/", given)
    if _NAMELESS.match(given):
        return Target("", path, url.query or b"")
    named = _SESSION.match(path)
    if named:
        session, path = named[1], named[2]
    path = _REPEATED_V1.sub("", path.rstrip("/") or "/")
    if path.startswith(_WITHOUT_V1):
        path = "/v1" + path
    return Target(session, path, url.query or b"")
