"""TRL's AsyncGRPO on our OpenEnv sessions: harness_steps.py TOKENIZER_FOLDER STEPS. Prints one JSON object.

`HarnessRolloutWorker` is TRL's own, in the process that TRL spawns for it. Stand-ins: attention, which TRL has as a
CUDA kernel alone, is torch's; a CPU has no name in TRL's table of speeds; and weights go nowhere, since the scripted
engine has none. The worker is made as the docs show (SHOWN). The model is a small one with random weights.
"""

import json
import logging
import os
import sys
import tempfile
import types
import warnings

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

from train.online.groups import connect
from train.online.trl import task_prompts

FOLDER, STEPS = sys.argv[1], int(sys.argv[2])
GROUP = 4


def flash_attn_varlen_func(q, k, v, starts_q, starts_k, _longest_q, _longest_k, *, softmax_scale, causal, window_size):
    """Each segment's queries are the last of its keys."""
    assert causal and window_size == (-1, -1)
    parts = []
    bounds_q, bounds_k = starts_q.tolist(), starts_k.tolist()
    for at in range(len(bounds_q) - 1):
        query = q[bounds_q[at] : bounds_q[at + 1]].transpose(0, 1)
        key, value = (each[bounds_k[at] : bounds_k[at + 1]].transpose(0, 1) for each in (k, v))
        size, held = query.shape[1], key.shape[1]
        mask = torch.ones(size, held, dtype=torch.bool).tril(held - size)
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(parts)


class NoWeights:
    """Counts how often weights would have gone to the engine."""

    def __init__(self):
        self.sent = 0

    def init_weight_transfer(self): ...

    def pause(self): ...

    def send_weights(self, iterator):
        self.sent += len(list(iterator)) > 0

    def resume(self): ...

    def destroy(self): ...


class NotingQueue:
    """The worker's queue, and what the trainer took from it. In the worker's process it is the queue itself."""

    def __init__(self, queue):
        self.queue, self.taken = queue, []

    def __reduce__(self):
        return _itself, (self.queue,)

    def __getattr__(self, name):
        return getattr(self.queue, name)

    def get(self, *args, **kwargs):
        self.taken.append(self.queue.get(*args, **kwargs))
        return self.taken[-1]

    def get_nowait(self):
        self.taken.append(self.queue.get_nowait())
        return self.taken[-1]


def _itself(queue):
    return queue


def main():
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING)
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    # TRL wants to parse replies, of chat templates that it knows alone; a session's agent parses its own.
    tokenizer.response_schema = {"type": "object"}
    torch.manual_seed(7)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
        )
    )  # fmt: skip
    dataset = Dataset.from_list(task_prompts(connect()) * (8 * STEPS))
    transfer = NoWeights()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        program = {"dataset": dataset, "tokenizer": tokenizer}
        exec(os.environ["SHOWN"], program)
        worker = program["worker"]
        worker.rollout_buffer = NotingQueue(worker.rollout_buffer)
        trainer = AsyncGRPOTrainer(
            model=f"{folder}/model",
            args=AsyncGRPOConfig(
                output_dir=f"{folder}/out", max_steps=STEPS, per_device_train_batch_size=GROUP,
                gradient_accumulation_steps=1, num_generations=GROUP, learning_rate=1e-3, logging_steps=1,
                report_to=[], use_cpu=True, save_strategy="no", bf16=False, token_budget=1400,
            ),
            train_dataset=dataset,
            processing_class=tokenizer,
            rollout_worker=worker,
            weight_transfer=transfer,
        )  # fmt: skip
        try:
            trainer.train()
        finally:
            worker.stop()
    print("\n" + json.dumps({
        "step": trainer.state.global_step,
        "sent": transfer.sent,
        "logs": [{name: entry[name] for name in sorted(entry)} for entry in trainer.state.log_history],
        "samples": [
            {
                "input_ids": sample.input_ids.tolist(), "mask": sample.completion_mask.tolist(),
                "logprobs": sample.old_log_probs.tolist(), "advantage": sample.advantage, "group": sample.group_id,
                "reward": sample.metrics["reward"], "completion": sample.completion[-1:],
                "version": sample.model_version,
            }
            for sample in worker.rollout_buffer.taken
        ],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
