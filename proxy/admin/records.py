"""A session's records: the whole lines of its journal, in pieces of bounded size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from proxy.errors import NoSuchSession

#: Bytes that are read at once.
PIECE = 1 << 20


async def records(journal: Path, skip: int) -> AsyncIterator[bytes]:
    """The lines that are in the journal now, without the first `skip`, in pieces that may end within a line.

    A line that is being written is left out. Raises `NoSuchSession` if the journal is gone.
    """
    loop = asyncio.get_running_loop()
    try:
        file = await loop.run_in_executor(None, journal.open, "rb")
    except OSError as error:
        raise NoSuchSession(f"the journal {journal} cannot be read: {error.strerror}") from error
    return _pieces(file, skip)


async def _pieces(file: BinaryIO, skip: int) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    with file:
        left = await loop.run_in_executor(None, _end_of_lines, file)
        file.seek(0)
        while left:
            piece = await loop.run_in_executor(None, file.read, min(PIECE, left))
            if not piece:
                return  # it was cut meanwhile
            left -= len(piece)
            piece, skip = _without_lines(piece, skip)
            if piece:
                yield piece


def _end_of_lines(file: BinaryIO) -> int:
    """The size of the file up to the end of its last whole line."""
    at = file.seek(0, 2)
    while at:
        start = max(at - PIECE, 0)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        at = start
    return 0


def _without_lines(piece: bytes, skip: int) -> tuple[bytes, int]:
    """`piece` after its first `skip` line ends, and how many are still to be skipped."""
    if not skip:
        return piece, 0
    lines = piece.count(b"\n")
    if lines < skip:
        return b"", skip - lines
    at = 0
    for _ in range(skip):
        at = piece.index(b"\n", at) + 1
    return piece[at:], 0
