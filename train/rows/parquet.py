"""Parquet files of message rows: spooled as JSON Lines, their types merged row by row, written in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import orjson

from train.errors import BadInput, TrainError
from train.extras import optional
from train.rows.atomic_file import AtomicFile, cannot_write
from train.rows.formats.base import Row

#: Rows are written in batches of about this many bytes of JSON.
BATCH_BYTES: Final = 8 << 20


class ParquetWriter:
    """A `RowWriter` for a Parquet file. Arrow structs have the keys of all rows, null where a row has none.

    With `structs` (verl), tools and arguments are structs. Arguments stay structs only if that adds no null; otherwise
    all of them become JSON strings. Tools stay structs, and `commit` says when nulls were added to them.
    """

    def __init__(self, path: Path, *, structs: bool) -> None:
        """Raises `BadInput` where pyarrow is not installed."""
        arrow()
        self.path = path
        self._spool = AtomicFile(path)
        self._structs = structs
        self._argument_shapes: set[str] = set()
        self._tool_shapes: set[str] = set()

    def write(self, row: Row) -> None:
        if self._structs:
            for message in row["messages"]:
                for call in message.get("tool_calls", ()):
                    self._argument_shapes.add(_shape(call["function"]["arguments"]))
            self._tool_shapes |= {_shape(tool) for tool in row["tools"] or ()}
        self._spool.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def mark(self) -> int:
        return self._spool.tell()

    def roll_back(self, mark: int) -> None:
        self._spool.truncate(mark)

    def commit(self) -> list[str]:
        notes = []
        as_text = self._structs and (len(self._argument_shapes) > 1 or "{}" in self._argument_shapes)
        if as_text:
            notes.append(
                "tool calls differ in their arguments, and as Parquet structs each would get the others' keys, null: "
                "they are JSON strings here, right for templates that ask `is string` (Qwen3), quoted twice by those "
                "that do not (Qwen2.5); check with bench train validate --tokenizer, or use trl-sft-ids, which needs "
                "no template"
            )
        if self._structs and len(self._tool_shapes) > 1:
            notes.append(
                "tools differ in their parameters: Parquet fills each with the others' keys, null, and a template that "
                "writes them with tojson shows the nulls; check with bench train validate --tokenizer, or use "
                "trl-sft-ids, which needs no template"
            )
        self._spool.flush()
        try:
            self._write(arguments_as_text=as_text)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        return notes

    def _write(self, *, arguments_as_text: bool) -> None:
        pa, merged = arrow(), None
        for rows in self._batches(arguments_as_text):
            try:
                schema = pa.schema(list(pa.array(rows).type))
                merged = schema if merged is None else pa.unify_schemas([merged, schema], promote_options="permissive")
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
                raise TrainError(
                    f"the rows do not fit into one Parquet table ({str(error).splitlines()[0]}); nothing was written: "
                    "convert the agents separately, or use trl-sft-ids"
                ) from error
        schema = _typed(merged if merged is not None else pa.schema([]))
        with AtomicFile(self.path) as made:
            with parquet().ParquetWriter(made.file, schema) as writer:
                for rows in self._batches(arguments_as_text):
                    array = pa.array(rows, type=pa.struct(list(schema)))
                    writer.write_batch(pa.RecordBatch.from_struct_array(array).cast(schema))
            made.commit()

    def _batches(self, arguments_as_text: bool) -> Iterator[list[Row]]:
        rows: list[Row] = []
        size = 0
        with self._spool.temp_path.open("rb") as file:
            for line in file:
                row = orjson.loads(line)
                if arguments_as_text:
                    for message in row["messages"]:
                        for call in message.get("tool_calls", ()):
                            function = call["function"]
                            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
                rows.append(row)
                size += len(line)
                if size > BATCH_BYTES:
                    yield rows
                    rows, size = [], 0
        if rows:
            yield rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.__exit__(kind, error, trace)


def arrow() -> Any:
    """pyarrow. Raises `BadInput` where it is not installed or cannot be imported."""
    needs: Any = {"needed_for": "Parquet needs the benchflow train extra", "extra": "train"}
    optional("pyarrow", "ArrowInvalid", **needs)  # half of a package has no attributes
    return optional("pyarrow", **needs)


def parquet() -> Any:
    return import_module("pyarrow.parquet")


def read_parquet(path: Path) -> Iterator[Any]:
    """The rows of a Parquet file, with the nulls that Arrow filled in: what a trainer sees."""
    pa = arrow()
    try:
        with parquet().ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                yield from batch.to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _shape(value: Any) -> str:
    """The keys, in order, and types of a value, as Arrow would have to hold them."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_shape(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + "|".join(sorted({_shape(item) for item in value})) + "]"
    return type(value).__name__


def _typed(schema: Any) -> Any:
    """The schema with a string where a type is null: a column of type null cannot be joined with another file's."""
    pa = arrow()
    return pa.schema([pa.field(field.name, _type(pa, field.type)) for field in schema])


def _type(pa: Any, kind: Any) -> Any:
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        # Parquet has no struct without fields ({}, the properties of a tool without arguments).
        return pa.struct(
            [pa.field(field.name, _type(pa, field.type)) for field in fields if not _empty(pa, field.type)]
        )
    if pa.types.is_list(kind):
        return pa.list_(_type(pa, kind.value_type))
    return kind


def _empty(pa: Any, kind: Any) -> bool:
    if pa.types.is_list(kind):
        return _empty(pa, kind.value_type)
    return bool(pa.types.is_struct(kind)) and all(_empty(pa, kind.field(at).type) for at in range(kind.num_fields))
