"""The proxy's log: its own lines on stderr, and none of its packages'."""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for name in ("uvicorn", "uvicorn.error", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
