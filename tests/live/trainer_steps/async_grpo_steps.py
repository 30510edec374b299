"""TRL's AsyncGRPO on the CPU trains the model that `bench serve --gguf` serves, for three updates, as docs/online.md
shows it: the program is in the variable SHOWN and runs in FOLDER. Prints one JSON object.

All of it is TRL's own but two functions that need CUDA: `flash_attn_varlen_func` below stands in for FlashAttention,
and the device's peak speed, which is for a metric, is left unknown.
"""

import functools
import json
import math
import os
from types import SimpleNamespace
from typing import ClassVar

import torch
import trl.experimental.async_grpo as async_grpo
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import train.online.trl as adapter
import train.online.weights as transfers


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=True,
    window_size=(-1, -1),
):
    """Attention of each segment's queries, the last rows of its keys, over the keys before them: [tokens, heads, d]."""
    assert causal and window_size == (-1, -1)
    out = torch.empty_like(q)
    for segment in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[segment]), int(cu_seqlens_q[segment + 1]))
        keys = slice(int(cu_seqlens_k[segment]), int(cu_seqlens_k[segment + 1]))
        queries, length = rows.stop - rows.start, keys.stop - keys.start
        mask = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
        found = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys])),
            attn_mask=mask, scale=softmax_scale, enable_gqa=True,
        )  # fmt: skip
        out[rows] = found[0].transpose(0, 1)
    return out


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None

ROWS = []


def sample(**fields):
    ROWS.append(RolloutSample(**fields))
    return ROWS[-1]


class Transfer(transfers.GgufTransfer):
    """Keeps what was sent as each version, to compute the logprobs of it afterwards."""

    def send_weights(self, iterator):
        sent = {name: tensor.detach().clone() for name, tensor in iterator}
        torch.save(sent, f"sent-{self.version + 1}.pt")
        super().send_weights(sent.items())


class Trainer(async_grpo.AsyncGRPOTrainer):
    """Notes how far each ratio is from 1, before the step."""

    distances: ClassVar = []

    def compute_loss(self, model, inputs, **options):
        seen = []
        handle = model.register_forward_hook(lambda _, __, outputs: seen.append(outputs.log_probs.detach()))
        loss = super().compute_loss(model, inputs, **options)
        handle.remove()
        selected = inputs["token_index"] >= 0
        log_probs = seen[0].flatten()[inputs["token_index"][selected]]
        ratios = (log_probs - inputs["old_log_probs"][selected]).exp()
        self.distances.append([float((ratios - 1).abs().max()), float((ratios - 1).abs().mean()), len(ratios)])
        return loss


def worst(model, row):
    """For each reply in a row, where it begins: the largest distance of its logprobs from those of the model."""
    ids, mask = torch.from_numpy(row.input_ids), row.completion_mask.tolist()
    trained = torch.from_numpy(row.completion_mask)[1:].bool()
    with torch.no_grad():
        logits = model(ids.unsqueeze(0)).logits[0, :-1][trained]
    found = torch.zeros(len(trained))
    found[trained] = logits.log_softmax(-1).gather(1, ids[1:][trained].unsqueeze(1)).squeeze(1)
    distances = (found - torch.from_numpy(row.old_log_probs)[1:]).abs().tolist()
    replies, start = {}, None
    for at in range(1, len(mask)):
        if mask[at]:
            start = at if not mask[at - 1] else start
            replies[start] = max(replies.get(start, 0.0), distances[at - 1])
    return replies


def later(sent, version):
    """The first version after this one whose weights are others: a step on groups of equal rewards moves nothing."""
    return next(
        (v for v in sent if v > version and any(not torch.equal(sent[v][n], sent[version][n]) for n in sent[v])), None
    )


def main():
    os.chdir(os.environ["FOLDER"])
    torch.set_num_threads(1)
    async_grpo.AsyncGRPOTrainer, transfers.GgufTransfer = Trainer, Transfer
    adapter.RolloutWorker = functools.partial(adapter.RolloutWorker, sample_type=sample)
    shown = {}
    exec(compile(os.environ["SHOWN"], "docs/online.md", "exec"), shown)
    trainer, transfer = shown["trainer"], shown["trainer"].weight_transfer
    first = torch.load("sent-1.pt")
    moved = any(not torch.equal(value, first[name]) for name, value in trainer.model.named_parameters())
    rows = list(ROWS)
    plain = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    sent = {version: torch.load(f"sent-{version}.pt") for version in range(1, transfer.version + 1)}
    by_version = [{} for _ in rows]
    for version, weights in sent.items():
        plain.load_state_dict(weights, strict=False)
        for row, found in zip(rows, by_version, strict=True):
            if version == row.model_version or (row.group_id < 2 and version == later(sent, row.model_version)):
                found[version] = worst(plain, row)
    result = {
        "versions": transfer.version, "moved": moved, "distances": Trainer.distances,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rewards": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
        "rows": [
            {
                "input_ids": row.input_ids.tolist(), "mask": row.completion_mask.tolist(),
                "logprobs": row.old_log_probs.tolist(), "version": row.model_version, "group": row.group_id,
                "advantage": row.advantage, "reward": row.metrics["reward"], "by_version": found,
            }
            for row, found in zip(rows, by_version, strict=True)
        ],
    }  # fmt: skip
    assert all(math.isfinite(loss) for loss in result["losses"])
    print(json.dumps(result))


main()
