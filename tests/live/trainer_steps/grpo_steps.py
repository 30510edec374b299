"""TRL's GRPOTrainer on the rollouts of a service: grpo_steps.py URL KEY TOKENIZER_FOLDER STEPS. Prints one JSON object.

The model is a small one with random weights and the tokenizer's vocabulary: what is shown is the trainer's way with the
rows, not that it learns.
"""

import json
import logging
import sys
import tempfile
import warnings

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from train.online.client import RolloutService
from train.online.grpo import ServiceRollouts, rollout_reward


class Noting:
    """A weight transfer to an engine that has no weights: it reads all of them, and notes each update."""

    def __init__(self) -> None:
        self.updates = []

    def update(self, weights) -> int:
        tensors = dict(weights)
        self.updates.append([len(tensors), float(sum(tensor.double().sum() for tensor in tensors.values()))])
        return len(self.updates)


url, key, folder, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
warnings.simplefilter("ignore")
logging.basicConfig(level=logging.WARNING)
service = RolloutService(url, key)
tokenizer = AutoTokenizer.from_pretrained(folder)
torch.manual_seed(7)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
    )
)  # fmt: skip
transfer = Noting()
rollouts = ServiceRollouts(service, transfer=transfer, deadline=300)
taken = []


def noting_rollouts(prompts, trainer):
    rows = rollouts(prompts, trainer)
    taken.append({name: list(values) for name, values in rows.items()})
    return rows


with tempfile.TemporaryDirectory() as out:
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rollout_reward,
        rollout_func=noting_rollouts,
        train_dataset=Dataset.from_list([{"prompt": task["prompt"]} for task in service.tasks()] * steps),
        args=GRPOConfig(
            output_dir=out, max_steps=steps, per_device_train_batch_size=4, num_generations=4, learning_rate=1e-3,
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", bf16=False,
            max_completion_length=2048,
        ),
    )  # fmt: skip
    trainer.train()
print("\n" + json.dumps({
    "calls": taken,
    "updates": transfer.updates,
    "step": trainer.state.global_step,
    "logs": [{name: entry[name] for name in sorted(entry)} for entry in trainer.state.log_history],
}))  # fmt: skip
