"""OpenEnv's own records from openenv-episodes rows: openenv_steps.py RESULTS.jsonl. Prints one JSON object."""

import json
import sys

from datasets import load_dataset
from openenv.core.harness.collect import EpisodeRecord

with open(sys.argv[1]) as file:
    rows = [json.loads(line) for line in file]
episodes = [EpisodeRecord(**row) for row in rows]
loaded = load_dataset("json", data_files=sys.argv[1], split="train")
print("\n" + json.dumps({
    "rows": len(episodes),
    "loaded": len(loaded),
    "rewards": [episode.reward for episode in episodes],
    "again": [episode.to_dict() == row for episode, row in zip(episodes, rows, strict=True)],
}))  # fmt: skip
