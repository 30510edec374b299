#!/bin/bash
# Reward 1 when errors.txt is right and server.log untouched, else 0.
cd "$LOG_FOLDER"
reward=0
if cmp -s errors.txt /tests/expected.txt && [ "$(cksum < server.log)" = "$(cksum < /tests/server.log)" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
