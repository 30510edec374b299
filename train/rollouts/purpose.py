"""Which rollouts a command takes: those made for training, those of an evaluation, or all."""

from __future__ import annotations

from typing import Final

from train.errors import BadInput
from train.rollouts.rollouts import Rollout

CHOICES: Final = ("train", "eval", "all")
HELP: Final = "train: what was run for training; eval: what was run as an evaluation; all: both."


def check_purpose(purpose: str) -> None:
    """Raises `BadInput`."""
    if purpose not in CHOICES:
        raise BadInput(f"--purpose must be train, eval or all, not {purpose!r}")


def is_wanted(rollout: Rollout, purpose: str) -> bool:
    return purpose in ("all", rollout.purpose)


def other(purpose: str) -> str:
    """What `purpose` leaves out, in words."""
    return "evaluation" if purpose == "train" else "training"
