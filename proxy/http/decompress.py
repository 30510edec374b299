"""Compressed bodies undone piece by piece, so that no body, however small, becomes more memory than its bound."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

CODINGS = frozenset((b"gzip", b"x-gzip", b"deflate"))
#: A piece that comes out is at most this large.
PIECE = 1 << 20


class Inflate:
    """gzip (of one or several members) and zlib. Raises `zlib.error` for what is neither."""

    def __init__(self) -> None:
        self._z = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` gives, in pieces; what is not taken is not inflated."""
        while data:
            piece = self._z.decompress(data, PIECE)
            if piece:
                yield piece
            if self._z.eof:
                data = self._z.unused_data
                if data:  # the next member
                    self._z = zlib.decompressobj(zlib.MAX_WBITS | 32)
            else:
                data = self._z.unconsumed_tail

    def finish(self) -> None:
        """Raises `zlib.error` when the data ended too early."""
        if not self._z.eof:
            raise zlib.error("it ends too early")
