"""Decompression in bounded pieces, however the compressed bytes are split."""

from __future__ import annotations

import gzip
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http.decompress import PIECE, DecompressError, decompressor

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LARGE = b"".join(b"%d " % number for number in range(500_000))
CODERS = {
    "gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress,
}  # fmt: skip


def bare_deflate(data: bytes, level: int = -1) -> bytes:
    """`deflate` as some clients send it: RFC 1951 without zlib's header."""
    coder = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    return coder.compress(data) + coder.flush()


def split(data: bytes, step: int) -> list[bytes]:
    return [data[at : at + step] for at in range(0, len(data), step)]


def decompressed(coding: str, data: list[bytes]) -> bytes:
    coder = decompressor(coding)
    assert coder is not None
    pieces = [piece for part in data for piece in coder.feed(part)]
    coder.finish()
    assert all(len(piece) <= PIECE for piece in pieces)
    return b"".join(pieces)


@pytest.mark.parametrize("coding", CODERS)
@pytest.mark.parametrize("step", [997, 1 << 30])
def test_a_body_is_the_same_however_it_is_split(coding: str, step: int) -> None:
    assert decompressed(coding, split(CODERS[coding](LARGE), step)) == LARGE


@given(st.binary(max_size=300), st.integers(1, 9), st.integers(0, 9))
def test_bare_deflate_is_distinguished_from_zlib(data: bytes, step: int, level: int) -> None:
    assert decompressed("deflate", split(bare_deflate(data, level), step)) == data
    assert decompressed("deflate", split(zlib.compress(data, level), step)) == data


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_several_members_or_frames_are_one_body(coding: str) -> None:
    data = CODERS[coding](b"one ") + CODERS[coding](b"two")
    assert decompressed(coding, split(data, 1)) == decompressed(coding, [data]) == b"one two"


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", b""), ("deflate", b""), ("deflate", b"x"), ("zstd", b""), ("zstd", zstd.compress(b"abc")[:-2]),
        ("gzip", zstd.compress(b"abc")), ("zstd", gzip.compress(b"abc")), ("deflate", b"\xff\xff\xff"),
        ("deflate", bare_deflate(b"abc" * 99)[:-2]), ("gzip", gzip.compress(b"abc") + b"garbage"),
        ("zstd", zstd.compress(b"abc") + b"garbage"),
    ],
)  # fmt: skip
def test_data_that_is_broken_or_ends_early_is_an_error(coding: str, data: bytes) -> None:
    for step in (1, 1 << 20):
        with pytest.raises(DecompressError):
            decompressed(coding, split(data, step))


def test_a_zstd_window_of_more_than_8_mib_is_refused_before_its_memory_is_taken() -> None:
    options = {zstd.CompressionParameter.window_log: 27}
    coder = zstd.ZstdCompressor(options=options)
    data = coder.compress(bytes(100)) + coder.flush()  # streamed: the frame names its window, not its size
    with pytest.raises(DecompressError, match="memory"):
        decompressed("zstd", [data])
