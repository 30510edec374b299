"""verl's own MultiTurnSFTDataset reads verl-sft rows: verl_steps.py ROWS.parquet WEIGHTS TEMPLATE. Prints JSON."""

import json
import sys

from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
with open(sys.argv[3]) as file:
    tokenizer.chat_template = file.read()
config = OmegaConf.create(
    {"pad_mode": "no_padding", "max_length": 8192, "truncation": "error", "messages_key": "messages"}
)
rows = MultiTurnSFTDataset([sys.argv[1]], tokenizer, config)
made = [rows[at] for at in range(len(rows))]
print("\n" + json.dumps({
    "rows": len(rows),
    "trained": [tokenizer.decode(row["input_ids"][row["loss_mask"].bool()]) for row in made],
    "tokens": [len(row["input_ids"]) for row in made],
}))  # fmt: skip
