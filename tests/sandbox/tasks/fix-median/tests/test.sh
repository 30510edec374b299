#!/bin/bash
# Reward 1 when every test passes, else 0.
cd /app
if python3 /tests/test_stats.py -v; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
