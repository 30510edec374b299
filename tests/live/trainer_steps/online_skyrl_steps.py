"""A group through SkyRL's own trainer methods: online_skyrl_steps.py WEIGHTS TASK step|whole. Prints JSON.

No GPU and no Ray: the trainer object has a configuration of SkyRL's own and neither model nor engine; generating,
validating, padding and advantages are its own methods. On Python 3.11 SkyRL fails in pydantic, which wants
`typing_extensions.TypedDict` there: it is put in place of `typing.TypedDict` first.
"""

import asyncio
import json
import os
import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict

from types import SimpleNamespace

import numpy as np
from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.trainer import RayPPOTrainer
from transformers import AutoTokenizer

WEIGHTS, TASK, MODE = sys.argv[1:4]
N = 4

cfg = SkyRLTrainConfig()
cfg.generator.n_samples_per_prompt = N
cfg.generator.step_wise_trajectories = cfg.generator.merge_stepwise_output = MODE == "step"
cfg.trainer.train_batch_size = cfg.trainer.policy_mini_batch_size = 1
trainer = RayPPOTrainer.__new__(RayPPOTrainer)
trainer.cfg, trainer.all_metrics, trainer.global_step = cfg, {}, 3
trainer.tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)
shown: dict[str, typing.Any] = {}
exec(os.environ["SHOWN"], shown)
experiment = shown["Experiment"].__new__(shown["Experiment"])
trainer.generator = experiment.get_generator(cfg, trainer.tokenizer, None)

prompt = {
    "prompt": [{"role": "user", "content": "Do the task."}],
    "env_class": None,
    "env_extras": {"task": TASK},
    "uid": "17",
}
sampling = get_sampling_params_for_backend("vllm", cfg.generator.sampling_params)
batch, uids = prepare_generator_input([prompt], N, sampling, "none", "train", trainer.global_step)
output = asyncio.run(trainer.generate(batch))
said = {
    name: output[name]
    for name in ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "rewards", "stop_reasons")
}
said["last"] = output["is_last_step"]
if MODE == "step":
    uids = [trajectory.instance_id for trajectory in output["trajectory_ids"]]
    said["repetitions"] = [trajectory.repetition_id for trajectory in output["trajectory_ids"]]
output, uids = trainer.postprocess_generator_output(output, uids)
said["merged"] = len(output["response_ids"])
data = trainer.convert_to_training_input(output, uids)
data["values"] = None
data = trainer.compute_advantages_and_returns(data)
said["advantages"] = [
    sorted({round(float(value), 4) for value in row[mask.bool()]})
    for row, mask in zip(data["advantages"], data["loss_mask"], strict=True)
]
said["trained"] = np.asarray(data["loss_mask"].sum(-1)).astype(int).tolist()
said["metrics"] = {name: float(value) for name, value in trainer.all_metrics.items()}
print("\n" + json.dumps(said))
