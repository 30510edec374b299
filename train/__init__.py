"""From logs to trainers: coverage, streams, groups with advantages, and rows. Reads files; needs no network.

`from train import stream_rollouts` yields the records of `bench train stream`.
"""

from train.api import OnWithheld, astream_rollouts, stream_rollouts
from train.errors import BadInput, JobStopped, NoSuchPath, StreamTimeout, TrainError
from train.stream.records import CallRecord, CompletionRecord, RolloutRecord, SegmentRecord, SequenceRecord

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
