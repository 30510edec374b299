"""Header lists as they are on the wire, and the two that replies of our own begin with."""

from __future__ import annotations

#: Names in lower case, in the order of the message; a name may occur more than once.
Headers = list[tuple[bytes, bytes]]

SSE_HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON_HEADERS: Headers = [(b"content-type", b"application/json")]
