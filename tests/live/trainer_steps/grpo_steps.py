"""TRL's GRPOTrainer on the rollouts of a service: grpo_steps.py TOKENIZER_FOLDER STEPS. Prints one JSON object.

The program is the one that the docs show (SHOWN), on a CPU and for so many steps. The model is a small one with random
weights and the tokenizer's vocabulary: what is shown is the trainer's way with the rows, not that it learns.
"""

import json
import logging
import os
import sys
import tempfile
import warnings

import torch
import trl
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import train.online.grpo as adapter


class Noting:
    """A weight transfer to an engine that has no weights: it reads all of them, and notes each update."""

    def __init__(self) -> None:
        self.updates = []

    def update(self, weights) -> int:
        tensors = dict(weights)
        self.updates.append([len(tensors), float(sum(tensor.double().sum() for tensor in tensors.values()))])
        return len(self.updates)


class NotedRollouts(adapter.ServiceRollouts):
    def __init__(self, service, **options):
        super().__init__(service, transfer=transfer, **options)

    def __call__(self, prompts, trainer):
        rows = super().__call__(prompts, trainer)
        taken.append({name: list(values) for name, values in rows.items()})
        return rows


def cpu_config(output_dir, **options):
    return config(
        output_dir, **options, max_steps=int(sys.argv[2]), learning_rate=1e-3, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", bf16=False,
    )  # fmt: skip


warnings.simplefilter("ignore")
logging.basicConfig(level=logging.WARNING)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
transfer, taken, config = Noting(), [], trl.GRPOConfig
torch.manual_seed(7)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
    )
)  # fmt: skip
trl.GRPOConfig, adapter.ServiceRollouts = cpu_config, NotedRollouts
program = {}
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    model.save_pretrained("policy")
    tokenizer.save_pretrained("policy")
    exec(os.environ["SHOWN"], program)
    os.chdir("/")
trainer = program["trainer"]
print("\n" + json.dumps({
    "calls": taken,
    "updates": transfer.updates,
    "step": trainer.state.global_step,
    "logs": [{name: entry[name] for name in sorted(entry)} for entry in trainer.state.log_history],
}))  # fmt: skip
