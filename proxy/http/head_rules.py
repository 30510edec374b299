"""Which request heads are refused, and with which status (RFC 9110, RFC 9112). The parser refuses the others itself."""

from __future__ import annotations

import re

from proxy.errors import Refusal
from proxy.http.headers import Headers

#: A `uri-host` with an optional port (RFC 9110, 7.2); empty where the target has no authority.
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.%vV~_-]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
_METHOD = re.compile(rb"(?:\r\n)*[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32} [/*a-z]")


def broken(detail: str = "the request is not valid HTTP/1.1") -> Refusal:
    return Refusal(400, detail)


def too_large(detail: str) -> Refusal:
    return Refusal(431, detail)


def wrong_version() -> Refusal:
    return Refusal(505, "the request's version of HTTP is not supported; send it as HTTP/1.1")


def parse_error(error: Exception, data: bytes, first: bool) -> Refusal:
    """What the parser did not take. `first`: whether `data` begins with the request line."""
    text = str(error)
    if "HTTP version" in text or "PRI" in text:
        return wrong_version()
    if first and "method" in text and _METHOD.match(data):
        return Refusal(501, "the request's method is not one of HTTP's; the model routes take POST and GET")
    return broken(f"the request is not valid HTTP/1.1: {text[:1].lower()}{text[1:]}" if text else broken().message)


def head_error(version: str, headers: Headers) -> Refusal | None:
    """What is wrong with a head that the parser took: its version, its `Host`, its transfer codings, its `Expect`."""
    if version not in ("1.1", "1.0"):
        return wrong_version()
    hosts = 0
    chunked = False
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not _HOST.fullmatch(value):
                return broken("the request's Host is not a host with an optional port")
        elif name == b"transfer-encoding":
            codings = [coding for part in value.lower().split(b",") if (coding := part.strip(b" \t"))]
            if chunked and codings:
                return broken("chunked is not the request's last transfer coding")
            if any(coding != b"chunked" for coding in codings):
                return Refusal(501, "the request has a transfer coding other than chunked")
            chunked = True
        elif name == b"expect" and version == "1.1" and value.lower() != b"100-continue":
            return Refusal(417, "only `Expect: 100-continue` can be met")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return broken(f"the request has {hosts or 'no'} Host headers; it needs exactly one")
    if chunked and version == "1.0":
        return broken("HTTP/1.0 has no transfer codings; the request's end is not certain")
    return None
