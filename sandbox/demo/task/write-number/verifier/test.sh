#!/bin/bash
# Reward 1 when /app/answer.txt holds 42 (surrounding whitespace ignored), else 0.
if [ "$(tr -d '[:space:]' < /app/answer.txt 2>/dev/null)" = "42" ]; then
  echo PASS; echo 1 > /logs/verifier/reward.txt
else
  echo "FAIL: /app/answer.txt is $(head -c 80 /app/answer.txt 2>/dev/null || echo missing)"; echo 0 > /logs/verifier/reward.txt
fi
