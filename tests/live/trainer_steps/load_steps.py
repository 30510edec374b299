"""`datasets` loads rows as a trainer would: load_steps.py FILE. Prints what it found, one JSON object at the end.

`nulls` names every key that a loader filled with null in messages or tools.
"""

import json
import sys

from datasets import load_dataset


def nulls(value, path="") -> set:
    if isinstance(value, dict):
        found = {f"{path}.{key}" for key, inner in value.items() if inner is None}
        return found.union(*(nulls(inner, f"{path}.{key}") for key, inner in value.items()))
    if isinstance(value, list):
        return set().union(*(nulls(inner, path) for inner in value))
    return set()


file = sys.argv[1]
rows = load_dataset("parquet" if file.endswith(".parquet") else "json", data_files=file, split="train")
columns = [name for name in ("prompt", "completion", "messages", "tools", "tool_defs") if name in rows.column_names]
found = set().union(*(nulls({name: row[name] for name in columns}) for row in rows))
print("\n" + json.dumps({"rows": len(rows), "columns": sorted(rows.column_names), "nulls": sorted(found)}))
