"""The proxy's log: lines of its own on stderr, and no one else's."""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for quiet in ("uvicorn", "uvicorn.error", "httpx"):
        logging.getLogger(quiet).setLevel(logging.CRITICAL)
