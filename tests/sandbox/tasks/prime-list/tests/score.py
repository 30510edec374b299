import json
from pathlib import Path

wanted = {n for n in range(2, 100) if all(n % d for d in range(2, n))}
try:
    lines = Path("/work/primes.txt").read_text().split()
except OSError:
    lines = []
found = {int(line) for line in lines if line.isdigit()}
right, wrong = len(found & wanted), len(found - wanted) + sum(not line.isdigit() for line in lines)
reward = max(0.0, (right - wrong) / len(wanted))
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, "right": right, "wrong": wrong}))
