#!/bin/bash
# Partial credit: the share of right lines, less the wrong ones.
python3 /tests/score.py
