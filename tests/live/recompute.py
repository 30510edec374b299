"""Logprobs of captured ids, computed again with transformers: recompute.py WEIGHTS < captures.json > differences.json.

Runs in the engine's own environment, which has torch and transformers. Reads a list of
`{prompt_token_ids, token_ids, logprobs}`, writes for each the largest absolute difference.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
differences = []
for capture in json.load(sys.stdin):
    prompt, sampled = capture["prompt_token_ids"], capture["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0].float()
    rows = torch.log_softmax(logits[len(prompt) - 1 : len(prompt) + len(sampled) - 1], dim=-1)
    again = rows.gather(1, torch.tensor(sampled)[:, None])[:, 0]
    differences.append(float((again - torch.tensor(capture["logprobs"])).abs().max()))
json.dump(differences, sys.stdout)
