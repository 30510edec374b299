"""A group of rollouts through verl's own agent loop workers: online_verl_steps.py WEIGHTS TASK. Prints JSON.

verl's `AgentLoopWorker` runs in this process, with verl's own configuration, and pads what the loop returns. The worker
of `verl.trainer.ppo.v1` runs as well; two functions stand in for its TransferQueue servers and keep what is put there.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import hydra
import numpy as np
import torch
import verl
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils

WEIGHTS, TASK = sys.argv[1:3]
N, PROMPT, RESPONSE = 4, 1024, 1024

loops = Path(tempfile.mkdtemp(), "loops.yaml")
loops.write_text(os.environ["SHOWN"])
overrides = {
    "actor_rollout_ref.model.path": WEIGHTS,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": N,
    "actor_rollout_ref.rollout.prompt_length": PROMPT,
    "actor_rollout_ref.rollout.response_length": RESPONSE,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.agent.default_agent_loop": "benchflow",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": str(loops),
}
with hydra.initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
    config = hydra.compose("ppo_trainer", [f"{name}={value}" for name, value in overrides.items()])


def objects(*values):
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


rows = {
    "uid": objects(*["prompt-0"] * N),
    "index": np.zeros(N, dtype=int),
    "raw_prompt": objects(*[[{"role": "user", "content": "Do the task."}]] * N),
    "extra_info": objects(*[{"task": TASK, "split": "train"}] * N),
}


def levels(advantages, mask):
    return sorted({round(float(value), 4) for value in advantages[mask.bool()]})


async def classic():
    worker = AgentLoopWorker(config, None)
    batch = DataProto(batch=None, non_tensor_batch=dict(rows), meta_info={"global_steps": 3})
    return await worker.generate_sequences(batch)


batch = asyncio.run(classic())
batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = batch.batch["rm_scores"]
batch = compute_advantage(batch, adv_estimator="grpo", num_repeat=N)
said = {"classic": []}
for at in range(N):
    tensors = {name: values[at] for name, values in batch.batch.items()}
    attended = tensors["attention_mask"].bool()
    said["classic"].append({
        "prompt_ids": tensors["prompts"][attended[:PROMPT]].tolist(),
        "response_ids": tensors["responses"][attended[PROMPT:]].tolist(),
        "response_mask": tensors["response_mask"][attended[PROMPT:]].tolist(),
        "logprobs": tensors["rollout_log_probs"][attended[PROMPT:]].tolist(),
        "padding_is_masked": not bool(tensors["response_mask"][~attended[PROMPT:]].any()),
        "reward": float(tensors["rm_scores"].sum()),
        "advantages": levels(tensors["advantages"], tensors["response_mask"]),
        "left_out": batch.non_tensor_batch["left_out"][at],
    })  # fmt: skip

put = {}


async def kv_put(key, partition_id, tag):
    put.setdefault("status", {})[key] = tag["status"]


async def kv_batch_put(keys, fields, tags, partition_id):
    for at, key in enumerate(keys):
        put.setdefault("rows", {})[key] = ({name: values[at] for name, values in fields.items()}, tags[at])


agent_loop_tq.tq.async_kv_put, agent_loop_tq.tq.async_kv_batch_put = kv_put, kv_batch_put


async def v1():
    kind = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = kind.__new__(kind)
    AgentLoopWorker.__init__(worker, config, None)
    worker.background_tasks = set()
    prompt = {name: values[:1] for name, values in rows.items()} | {"uid": objects("prompt-1")}
    batch = tensordict_utils.get_tensordict(prompt)
    tensordict_utils.assign_non_tensor_data(batch, "global_steps", 3)
    await worker.generate_sequences(batch)
    await asyncio.gather(*worker.background_tasks)


asyncio.run(v1())
said["status"] = put["status"]
keys = sorted(put.get("rows", {}))
said["v1"] = [{
    "key": key, "prompt_ids": fields["prompts"].tolist(), "response_ids": fields["responses"].tolist(),
    "response_mask": fields["response_mask"].tolist(), "logprobs": fields["rollout_log_probs"].tolist(),
    "reward": float(fields["rm_scores"].sum()), "tag": tag,
} for key in keys for fields, tag in [put["rows"][key]]]  # fmt: skip
if keys:
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([put["rows"][key][0][source] for key in keys], batch_first=True)
        for name, source in {"response_mask": "response_mask", "token_level_rewards": "rm_scores"}.items()
    }
    data = DataProto.from_dict(tensors=padded, non_tensors={"uid": objects(*["prompt-1"] * len(keys))})
    data = compute_advantage_for_multi_trajectories(data, batch_keys=keys, adv_estimator="grpo", num_repeat=N)
    for row, advantages, mask in zip(said["v1"], data.batch["advantages"], padded["response_mask"], strict=True):
        row["advantages"] = levels(advantages, mask)
print("\n" + json.dumps(said))
