"""A group of rollouts through verifiers' own environment server: online_verifiers_steps.py TASK N. Prints JSON.

The client is the one that prime-rl has: it loads the taskset, dispatches each task N times over ZMQ, and validates the
episodes that come back as deltas.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.server import EnvServer

TASK, N = sys.argv[1], int(sys.argv[2])
folder = Path(tempfile.mkdtemp())
(folder / "benchflow_rollouts.py").write_text(os.environ["SHOWN"])
sys.path.insert(0, str(folder))
config = vf.resolve_env_config({"taskset": {"id": "benchflow-rollouts", "deadline": 300}})
tasks = list(vf.load_taskset(config.taskset))
[task] = [task for task in tasks if task.key == TASK]


async def main():
    server = EnvServer(config, "tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    await client.wait_for_server_startup()
    sampling = vf.SamplingConfig(temperature=1.0, top_p=1.0, extra_body={"top_k": -1, "cache_salt": "3"})
    endpoint = vf.TrainClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="UNUSED")
    data = task.data.model_dump(mode="json")
    episodes = await asyncio.gather(*(client.run(endpoint, "my-policy", sampling, data) for _ in range(N)))
    await client.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return episodes


said = {"tasks": [one.key for one in tasks], "episodes": []}
for episode in asyncio.run(main()):
    [trace] = episode.traces
    said["episodes"].append({
        "ok": episode.ok,
        "errors": [f"{error.type}: {error.message}" for error in episode.errors],
        "reward": trace.reward,
        "turns": trace.num_turns,
        "tokens": [trace.num_input_tokens, trace.num_output_tokens],
        "last_reply": trace.last_reply,
        "rollout": trace.info.get("rollout"),
        "branches": [
            {"token_ids": branch.token_ids, "mask": [int(value) for value in branch.sampled_mask],
             "logprobs": branch.logprobs, "trainable": branch.trainable}
            for branch in trace.branches
        ],
    })  # fmt: skip
print("\n" + json.dumps(said))
