"""Files of rows: written beside their place and renamed when they are whole; nothing is left of one that was not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

import orjson

from train.errors import BadInput, TrainError
from train.rows.formats import Format, Row


class Rows(Protocol):
    """Takes rows one by one; the file appears with `commit`, and a `with` block that ends before it leaves nothing."""

    path: Path

    def write(self, row: Row) -> None: ...
    def mark(self) -> int:
        """Where the rows end now, for `roll_back`."""
        ...

    def roll_back(self, mark: int) -> None:
        """Takes back all rows that were written since `mark`."""
        ...

    def commit(self) -> list[str]:
        """Puts the file in its place. Returns sentences that the reader of the rows should know."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


def open_rows(path: Path, form: Format) -> Rows:
    """A writer of rows to `path`, which may be a folder: then the format's own file name is used. Raises `BadInput`."""
    if form.container == "folder":
        if path.suffix in (".jsonl", ".json", ".parquet"):
            raise BadInput(f"{form.name} is a folder with {form.file} in it: give --out the folder's name")
        return EpisodeFolder(path, form.file)
    if path.is_dir():
        path = path / form.file
    parquet = path.suffix == ".parquet"
    if form.container == "parquet" and not parquet:
        raise BadInput(f"{form.name} is a Parquet file: give --out a name that ends in .parquet")
    if not parquet:
        return JsonlRows(path)
    if form.reads == "ids":
        raise BadInput(f"{form.name} is written as JSON Lines: give --out a name that ends in .jsonl")
    from train.rows.parquet import ParquetRows

    return ParquetRows(path, structs=form.container == "parquet")


class Beside:
    """A file beside `path`, of the same file system, that takes its place with `commit`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        except OSError as error:
            raise _cannot_write(path, error) from error
        self.beside = Path(name)
        self.file: IO[bytes] = os.fdopen(fd, "wb", buffering=1 << 20)

    def write(self, data: bytes) -> None:
        try:
            self.file.write(data)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def mark(self) -> int:
        return self.file.tell()

    def roll_back(self, mark: int) -> None:
        try:
            self.file.flush()
            self.file.seek(mark)
            self.file.truncate()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def commit(self) -> None:
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            os.fchmod(self.file.fileno(), 0o644)
            self.file.close()
            self.beside.replace(self.path)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.file.close()
        except OSError:
            pass  # what could not be flushed is thrown away with the file
        finally:
            self.beside.unlink(missing_ok=True)


def _cannot_write(path: Path, error: OSError) -> TrainError:
    return TrainError(f"cannot write {path}: {error.strerror or error}; nothing was written")


class JsonlRows:
    """JSON Lines. Ids may be `orjson.Fragment`s, which are copied, not parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = Beside(path)

    def write(self, row: Row) -> None:
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def mark(self) -> int:
        return self._file.mark()

    def roll_back(self, mark: int) -> None:
        self._file.roll_back(mark)

    def commit(self) -> list[str]:
        self._file.commit()
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(None, None, None)


class EpisodeFolder:
    """OpenEnv's folder: `results.jsonl`, and `metadata.json` that says how many episodes it holds."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._made = not folder.exists()
        self._rows = JsonlRows(self.path)
        self._marks = [0]

    def write(self, row: Row) -> None:
        self._rows.write(row)
        self._marks.append(self._rows.mark())

    def mark(self) -> int:
        return self._marks[-1]

    def roll_back(self, mark: int) -> None:
        self._rows.roll_back(mark)
        while self._marks[-1] > mark:
            self._marks.pop()

    def commit(self) -> list[str]:
        with Beside(self.path.parent / "metadata.json") as metadata:
            told = {"format": "openenv-episodes", "episodes": len(self._marks) - 1, "results": self.path.name}
            metadata.file.write(orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            self._rows.commit()
            metadata.commit()
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._rows.__exit__()
        if self._made and self.path.parent.is_dir() and not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()


def read_rows(path: Path, form: Format) -> Iterator[tuple[int, Any]]:
    """The rows of a file with their numbers, from 1; one in memory at a time. Raises `BadInput`."""
    if path.is_dir():
        path = path / form.file
    if path.suffix == ".parquet":
        from train.rows.parquet import read_parquet

        yield from read_parquet(path)
        return
    if form.container == "parquet":
        raise BadInput(f"{path} is no Parquet file; {form.name} is one")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    yield number, orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    raise BadInput(f"{path}: line {number}: invalid JSON: {error}") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
