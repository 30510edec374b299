"""A file that appears whole or not at all: written next to its place, renamed when it is complete."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from train.errors import TrainError


class AtomicFile:
    """A temporary file next to `path`, on the same file system, that replaces it with `commit`.

    As a context manager it removes the temporary file, committed or not. Every method raises `TrainError` where the
    disk is full or the path cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        except OSError as error:
            raise cannot_write(path, error) from error
        self.temp_path = Path(name)
        self.file: IO[bytes] = os.fdopen(fd, "wb", buffering=1 << 20)

    def write(self, data: bytes) -> None:
        try:
            self.file.write(data)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def flush(self) -> None:
        try:
            self.file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def tell(self) -> int:
        return self.file.tell()

    def truncate(self, offset: int) -> None:
        """Removes everything after `offset`."""
        try:
            self.file.flush()
            self.file.seek(offset)
            self.file.truncate()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def commit(self) -> None:
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            os.fchmod(self.file.fileno(), 0o644)
            self.file.close()
            self.temp_path.replace(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.file.close()
        except OSError:
            pass  # what could not be flushed is discarded with the file
        finally:
            self.temp_path.unlink(missing_ok=True)


def cannot_write(path: Path, error: OSError) -> TrainError:
    return TrainError(f"cannot write {path}: {error.strerror or error}; nothing was written")
