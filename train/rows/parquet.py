"""Parquet files of message rows: spooled as JSON Lines, their types merged row by row, written in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import orjson

from train.errors import BadInput, TrainError
from train.rows.formats import Row
from train.rows.writers import Beside

#: Rows are written together up to so many bytes of JSON.
BATCH_BYTES = 8 << 20


class ParquetRows:
    """Rows in, a Parquet file out. Arrow structs have the keys of all rows, null where a row has none.

    With `structs` (verl) tools and arguments are structs. Arguments stay so only if no null has to be filled in, else
    all of them become JSON strings; tools stay structs, and that nulls came into them is told.
    """

    def __init__(self, path: Path, *, structs: bool) -> None:
        arrow()
        self.path = path
        self._spool = Beside(path)
        self._structs = structs
        self._arguments: set[str] = set()
        self._tools: set[str] = set()

    def write(self, row: Row) -> None:
        if self._structs:
            for message in row["messages"]:
                for call in message.get("tool_calls", ()):
                    self._arguments.add(_shape(call["function"]["arguments"]))
            self._tools |= {_shape(tool) for tool in row["tools"]}
        self._spool.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def mark(self) -> int:
        return self._spool.mark()

    def roll_back(self, mark: int) -> None:
        self._spool.roll_back(mark)

    def commit(self) -> list[str]:
        notes = []
        as_text = len(self._arguments) > 1 or "{}" in self._arguments
        if self._structs and as_text:
            notes.append(
                "tool calls differ in their arguments, and as Parquet structs each would get the others' keys, null: "
                "they are JSON strings here, right for templates that ask `is string` (Qwen3), quoted twice by those "
                "that do not (Qwen2.5); bench train validate --tokenizer tells, trl-sft-ids needs no template"
            )
        if self._structs and len(self._tools) > 1:
            notes.append(
                "tools differ in their parameters: Parquet fills each with the others' keys, null, and a template that "
                "writes them with tojson shows the nulls; bench train validate --tokenizer tells, trl-sft-ids needs no "
                "template"
            )
        try:
            self._spool.file.flush()
            self._write(strings=self._structs and as_text)
        except OSError as error:
            raise TrainError(f"cannot write {self.path}: {error.strerror}; nothing was written") from error
        return notes

    def _write(self, *, strings: bool) -> None:
        pa, kind = arrow(), None
        for rows in self._batches(strings):
            try:
                found = pa.schema(list(pa.array(rows).type))
                kind = found if kind is None else pa.unify_schemas([kind, found], promote_options="permissive")
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
                raise TrainError(
                    f"the rows do not fit into one Parquet table ({str(error).splitlines()[0]}); nothing was written: "
                    "convert the agents one by one, or use trl-sft-ids"
                ) from error
        schema = _without_nulls(kind if kind is not None else pa.schema([]))
        with Beside(self.path) as made:
            with parquet().ParquetWriter(made.file, schema) as writer:
                for rows in self._batches(strings):
                    array = pa.array(rows, type=pa.struct(list(schema)))
                    writer.write_batch(pa.RecordBatch.from_struct_array(array).cast(schema))
            made.commit()

    def _batches(self, strings: bool) -> Iterator[list[Row]]:
        held: list[Row] = []
        size = 0
        with self._spool.beside.open("rb") as file:
            for line in file:
                row = orjson.loads(line)
                if strings:
                    for message in row["messages"]:
                        for call in message.get("tool_calls", ()):
                            call["function"]["arguments"] = json.dumps(
                                call["function"]["arguments"], ensure_ascii=False
                            )
                held.append(row)
                size += len(line)
                if size > BATCH_BYTES:
                    yield held
                    held, size = [], 0
        if held:
            yield held

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._spool.__exit__(None, None, None)


def arrow() -> Any:
    """pyarrow. Raises `BadInput` where it is not installed."""
    try:
        return import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise BadInput("Parquet needs the extra: pip install -e '.[train]' in a clone of benchflow-sidecar") from error


def parquet() -> Any:
    return import_module("pyarrow.parquet")


def read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    """The rows of a Parquet file, numbered from 1, with the nulls that Arrow filled in: what a trainer sees."""
    pa = arrow()
    try:
        number = 0
        with parquet().ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from error


def _shape(value: Any) -> str:
    """The keys, in order, and types of a value, as Arrow would have to hold them."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_shape(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + "|".join(sorted({_shape(item) for item in value})) + "]"
    return type(value).__name__


def _without_nulls(schema: Any) -> Any:
    """A column of nulls only is text: one of type null cannot be joined with another file's."""
    pa = arrow()
    return pa.schema([_field(pa, field) for field in schema])


def _empty(pa: Any, kind: Any) -> bool:
    if pa.types.is_list(kind):
        return _empty(pa, kind.value_type)
    return bool(pa.types.is_struct(kind)) and all(_empty(pa, kind.field(at).type) for at in range(kind.num_fields))


def _field(pa: Any, field: Any) -> Any:
    return pa.field(field.name, _type(pa, field.type))


def _type(pa: Any, kind: Any) -> Any:
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        # Parquet has no struct without fields ({}, the properties of a tool without arguments).
        return pa.struct([_field(pa, one) for one in fields if not _empty(pa, one.type)])
    if pa.types.is_list(kind):
        return pa.list_(_type(pa, kind.value_type))
    return kind
