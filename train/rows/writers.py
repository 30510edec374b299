"""Files of rows: JSON Lines, OpenEnv's folder, and the choice between them and Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import orjson

from train.errors import BadInput
from train.rows.atomic_file import AtomicFile
from train.rows.formats.base import Format, Row


class RowWriter(Protocol):
    """Takes rows one by one. The file appears with `commit`; a `with` block that ends before it leaves nothing."""

    path: Path

    def write(self, row: Row) -> None: ...
    def mark(self) -> int:
        """Where the rows end now, for `roll_back`."""
        ...

    def roll_back(self, mark: int) -> None:
        """Removes all rows that were written since `mark`."""
        ...

    def commit(self) -> list[str]:
        """Puts the file in its place. Returns sentences that the user of the rows should read."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_rows(path: Path, form: Format) -> RowWriter:
    """A writer of rows to `path`. Where that is a folder, the format's own file name is used. Raises `BadInput`."""
    if form.container == "folder":
        if path.suffix in (".jsonl", ".json", ".parquet"):
            raise BadInput(f"{form.name} is a folder with {form.file} in it: give --out the folder's name")
        return EpisodeWriter(path, form.file)
    if path.is_dir():
        path = path / form.file
    parquet = path.suffix == ".parquet"
    if form.container == "parquet" and not parquet:
        raise BadInput(f"{form.name} is a Parquet file: give --out a name that ends in .parquet")
    if not parquet:
        return JsonlWriter(path)
    if form.reads == "ids":
        raise BadInput(f"{form.name} is written as JSON Lines: give --out a name that ends in .jsonl")
    from train.rows.parquet import ParquetWriter  # pyarrow is optional

    return ParquetWriter(path, structs=form.container == "parquet")


class JsonlWriter:
    """JSON Lines. Ids may be `orjson.Fragment`s, which are copied, not parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AtomicFile(path)

    def write(self, row: Row) -> None:
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def mark(self) -> int:
        return self._file.tell()

    def roll_back(self, mark: int) -> None:
        self._file.truncate(mark)

    def commit(self) -> list[str]:
        self._file.commit()
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)


class EpisodeWriter:
    """OpenEnv's folder: `results.jsonl`, and `metadata.json` with the number of episodes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._new_folder = not folder.exists()
        self._rows = JsonlWriter(self.path)
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
        with AtomicFile(self.path.parent / "metadata.json") as metadata:
            content = {"format": "openenv-episodes", "episodes": len(self._marks) - 1, "results": self.path.name}
            metadata.write(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
            notes = self._rows.commit()
            metadata.commit()
        return notes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.__exit__(kind, error, trace)
        folder = self.path.parent
        if self._new_folder and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def read_rows(path: Path, form: Format) -> Iterator[tuple[int, Any]]:
    """The rows of a file with their numbers, from 1; one in memory at a time. Raises `BadInput`."""
    if path.is_dir():
        path = path / form.file
    if path.suffix == ".parquet":
        from train.rows.parquet import read_parquet

        yield from read_parquet(path)
        return
    if form.container == "parquet":
        raise BadInput(f"{path} is not a Parquet file; {form.name} needs one")
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
