"""TRL on the CPU, in its own environment: trl_steps.py sft|grpo ROWS WEIGHTS TEMPLATE. Prints one JSON object.

`sft` takes one step on a tiny random Llama with the policy's vocabulary; `grpo` one on the policy itself, whose
logprobs are compared with the captured ones token by token.
"""

import json
import sys
import tempfile

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WHAT, ROWS, WEIGHTS, TEMPLATE = sys.argv[1:5]


def sft() -> dict:
    rows = load_dataset("json", data_files=ROWS, split="train")
    names = ["input_ids", "labels"] if "input_ids" in rows.column_names else ["prompt", "completion", "tools"]
    rows = rows.select_columns(names)
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    with open(TEMPLATE) as file:
        tokenizer.chat_template = file.read()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
        )
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=len(rows), max_length=None,
        report_to=[], save_strategy="no", use_cpu=True, bf16=False, seed=0, logging_steps=1, learning_rate=1e-3,
    )  # fmt: skip
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    # The first position has nothing before it: the loss shifts labels by one and never sees it.
    trained = int((batch["labels"][:, 1:] != -100).sum())
    loss = trainer.train().training_loss
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return {"rows": len(rows), "trained": trained, "loss": loss, "moved": moved}


class Watched(GRPOTrainer):
    """Keeps what the step trained on, and how far its logprobs are from the captured ones."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        wanted = inputs["completion_ids"].size(1)
        with torch.no_grad():
            logps = self._get_per_token_logps_and_entropies(model, ids, mask, wanted)[0]
        trained = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        self.watched = {
            "difference": float((logps - inputs["sampling_per_token_logps"])[trained].abs().max()),
            "trained": trained.sum(dim=1).tolist(),
            "advantages": inputs["advantages"].flatten().tolist(),
        }
        return super()._compute_loss(model, inputs)


def grpo() -> dict:
    with open(ROWS) as file:
        rows = [json.loads(line) for line in file]
    model = LlamaForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)

    def rollout_func(prompts, trainer):
        assert len(prompts) == len(rows), (len(prompts), len(rows))
        names = {"prompt_ids", "completion_ids", "env_mask", "logprobs", "reward"}
        return {name: [row[name] for row in rows] for name in names}

    def captured_reward(completions, reward, **_):
        return reward

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=len(rows), num_generations=len(rows),
        max_completion_length=4096, temperature=1.0, beta=0.0, report_to=[], save_strategy="no", use_cpu=True,
        bf16=False, gradient_checkpointing=False, seed=0, logging_steps=1, learning_rate=1e-5,
    )  # fmt: skip
    trainer = Watched(
        model=model, args=arguments, reward_funcs=captured_reward, processing_class=tokenizer,
        rollout_func=rollout_func,
        train_dataset=Dataset.from_list([{"prompt": rows[0]["group"] or "task"}] * len(rows)),
    )  # fmt: skip
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = trainer.train().training_loss
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return {"rows": len(rows), "loss": loss, "moved": moved, **trainer.watched}


print("\n" + json.dumps({"sft": sft, "grpo": grpo}[WHAT]()))
