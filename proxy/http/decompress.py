"""Compressed request bodies, decompressed piece by piece, so that no body becomes more memory than its bound."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

#: What `Content-Encoding` may say, besides `identity`.
CODINGS = "gzip, deflate, zstd"
#: A piece that comes out is at most this large.
PIECE = 1 << 20
#: Base-2 logarithm of the largest zstd window, which the decompressor allocates whole: 8 MiB, as RFC 9659 demands.
ZSTD_WINDOW_LOG = 23


class DecompressError(Exception):
    """The data is not of its coding, is broken, or ends too early; the text says which."""


class Decompressor(Protocol):
    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` becomes, in pieces of at most `PIECE` bytes; what is not iterated over is not decompressed."""

    def finish(self) -> None:
        """Raises `DecompressError` where the data ended too early."""


def decompressor(coding: str) -> Decompressor | None:
    """The decompressor of one of `CODINGS`; None for any other."""
    if coding in ("gzip", "x-gzip"):
        return _Zlib()
    if coding == "deflate":
        return _Deflate()
    return _Zstd() if coding == "zstd" else None


class _Zlib:
    """gzip, of one or several members, and zlib."""

    def __init__(self, window: int = zlib.MAX_WBITS | 32) -> None:
        self._window = window
        self._z = zlib.decompressobj(window)

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            try:
                piece = self._z.decompress(data, PIECE)
            except zlib.error as error:
                raise DecompressError(str(error)) from error
            if piece:
                yield piece
            if not self._z.eof:
                data = self._z.unconsumed_tail
            elif data := self._z.unused_data:  # the next member
                self._z = zlib.decompressobj(self._window)

    def finish(self) -> None:
        if not self._z.eof:
            raise DecompressError("it ends too early")


class _Deflate:
    """`deflate` means zlib (RFC 9110, 8.4.1.2); some clients send bare deflate data (RFC 1951) under that name.

    The first two bytes tell: as deflate data, those of a zlib header would be a stored block with padding that is not
    zero, which no compressor writes.
    """

    def __init__(self) -> None:
        self._start = b""
        self._zlib: _Zlib | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._zlib is None:
            self._start += data
            if len(self._start) < 2:
                return
            data, first = self._start, int.from_bytes(self._start[:2])
            wrapped = ((first >> 8) & 15 == 8 and first % 31 == 0) or first == 0x1F8B
            self._zlib = _Zlib() if wrapped else _Zlib(-zlib.MAX_WBITS)
        yield from self._zlib.feed(data)

    def finish(self) -> None:
        if self._zlib is None:
            raise DecompressError("it ends too early")
        self._zlib.finish()


class _Zstd:
    """zstd, of one or several frames."""

    def __init__(self) -> None:
        self._new()

    def _new(self) -> None:
        self._z = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})

    def feed(self, data: bytes) -> Iterator[bytes]:
        while True:
            if self._z.eof:
                self._new()
            try:
                piece = self._z.decompress(data, PIECE)
            except zstd.ZstdError as error:
                raise DecompressError(str(error)) from error
            if piece:
                yield piece
            data = self._z.unused_data if self._z.eof else b""
            if not data and (self._z.eof or self._z.needs_input):
                return

    def finish(self) -> None:
        if not self._z.eof:
            raise DecompressError("it ends too early")
