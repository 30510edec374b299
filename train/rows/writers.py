"""Files of rows: JSON Lines, OpenEnv's folder, and the choice between them and Parquet."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol, Self

import orjson

from train.errors import BadInput
from train.rows.atomic_file import AtomicFile
from train.rows.column_types import ColumnTypes
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
    """JSON Lines, in the order of writing; only where `load_dataset` would refuse the file, some rows come earlier.

    Ids may be `orjson.Fragment`s, which are copied, not parsed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AtomicFile(path)
        self._types = ColumnTypes()
        self._blocks = array("q")  # where the rows, or the groups of rows, begin that must stay together
        self._group: int | None = None

    def write(self, row: Row) -> None:
        start = self._file.tell()
        group = row.get("group_number", row.get("extra", {}).get("group_number"))
        if group is None or group != self._group:
            self._blocks.append(start)
            self._group = group
        self._types.add(row, start)
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def mark(self) -> int:
        return self._file.tell()

    def roll_back(self, mark: int) -> None:
        self._file.truncate(mark)
        self._types.forget(mark)
        while self._blocks and self._blocks[-1] >= mark:
            self._blocks.pop()
            self._group = None

    def commit(self) -> list[str]:
        dates = [
            f"{path} has nothing but dates, which load_dataset reads from JSON Lines as timestamps: write Parquet "
            "(--out with a name that ends in .parquet)"
            for path in self._types.dates()
        ]
        if not self._types.late():
            self._file.commit()
            return dates
        return dates + self._commit_typed_rows_first()

    def _commit_typed_rows_first(self) -> list[str]:
        """Puts the rows first in which a field has its first value, so that `load_dataset` sees the types of all."""
        self._file.flush()
        block_ends = [*self._blocks[1:], self._file.tell()]
        at_front = sorted({bisect_right(self._blocks, offset) - 1 for offset in self._types.first.values()})
        types = ColumnTypes()
        with AtomicFile(self.path) as reordered, self._file.temp_path.open("rb") as rows:
            for block in at_front:
                for line in _lines(rows, self._blocks[block], block_ends[block]):
                    types.add(orjson.loads(line), reordered.tell())
                    reordered.write(line)
            front = set(at_front)
            for block, start in enumerate(self._blocks):
                if block not in front:
                    for line in _lines(rows, start, block_ends[block]):
                        reordered.write(line)
            reordered.commit()
        if late := sorted({path for path, _ in types.late()}):
            return [
                f"{len(late)} field(s), {late[0]} for one, have their first value after 10 MiB, where load_dataset has "
                "fixed the types: it will refuse the file; write Parquet (--out with a name that ends in .parquet)"
            ]
        return [
            f"{len(at_front)} row(s) or group(s) were moved to the front, so that every field has a value in the first "
            "10 MiB: load_dataset takes the types from there"
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)


def _lines(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    while file.tell() < end:
        yield file.readline()


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


class StoredRow(NamedTuple):
    """A row of a file: its number, from 1, its offset in bytes (None in Parquet), and its value, which may be any."""

    number: int
    offset: int | None
    value: Any


def read_rows(path: Path, form: Format) -> Iterator[StoredRow]:
    """The rows of a file, one in memory at a time. Raises `BadInput`."""
    if path.is_dir():
        path = path / form.file
    if path.suffix == ".parquet":
        from train.rows.parquet import read_parquet

        yield from (StoredRow(number, None, row) for number, row in enumerate(read_parquet(path), 1))
        return
    if form.container == "parquet":
        raise BadInput(f"{path} is not a Parquet file; {form.name} needs one")
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                start, offset = offset, offset + len(line)
                if line.isspace():
                    continue
                try:
                    yield StoredRow(number, start, orjson.loads(line))
                except orjson.JSONDecodeError as error:
                    raise BadInput(f"{path}: line {number}: invalid JSON: {error}") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
