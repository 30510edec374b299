"""Turn logs into trainer input: coverage, streams, groups with advantages, and rows. Reads files; needs no network.

`from train import stream_rollouts` yields the records of `bench train stream`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.api import OnWithheld, astream_rollouts, stream_rollouts
    from train.errors import BadInput, JobStopped, NoSuchPath, StreamTimeout, TrainError
    from train.stream.records import CallRecord, CompletionRecord, RolloutRecord, SegmentRecord, SequenceRecord

#: Loaded when asked for: `bench --help` needs none of it.
_DEFINED_IN = {
    "train.api": ("OnWithheld", "astream_rollouts", "stream_rollouts"),
    "train.errors": ("BadInput", "JobStopped", "NoSuchPath", "StreamTimeout", "TrainError"),
    "train.stream.records": ("CallRecord", "CompletionRecord", "RolloutRecord", "SegmentRecord", "SequenceRecord"),
}

__all__ = [
    "BadInput",
    "CallRecord",
    "CompletionRecord",
    "JobStopped",
    "NoSuchPath",
    "OnWithheld",
    "RolloutRecord",
    "SegmentRecord",
    "SequenceRecord",
    "StreamTimeout",
    "TrainError",
    "astream_rollouts",
    "stream_rollouts",
]


def __getattr__(name: str) -> Any:
    for module, names in _DEFINED_IN.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
