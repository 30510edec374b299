"""What can go wrong between logs and trainers. An error's text is one sentence: what happened and what to do.

TrainError                exit code 2
├── NoSuchPath            a path that was given does not exist
├── BadInput              an option or a file cannot be used as it is
├── NothingWritten        exit code 1: rows were asked for and none were written, or not as many as expected
├── JobStopped            exit code 1: the job was stopped, or its process died, before it finished
├── StreamTimeout         exit code 3: the job did not finish within the time that was given
└── ServiceError          a rollout service did not do what it was asked
    ├── ServiceUnavailable    it does not answer, or it is shutting down
    ├── ServiceRefused        it answered, and the answer is no: wrong key, unknown task, a field it cannot use
    └── ServiceBusy           its queue is full
"""

from __future__ import annotations

from collections.abc import Sequence

from capture.errors import BenchError


class TrainError(BenchError):
    """Root of every error raised in `train`; its text is a sentence for people."""


class NoSuchPath(TrainError):
    """A path that was given does not exist."""


class BadInput(TrainError):
    """An option or a file cannot be used as it is."""


class NothingWritten(TrainError):
    """Rows were asked for and no file was written; `notes` say by reason what was left out."""

    exit_code = 1

    def __init__(self, message: str, notes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.notes = tuple(notes)


class JobStopped(TrainError):
    """The job was stopped, or its process died, before it finished."""

    exit_code = 1


class StreamTimeout(TrainError):
    """The job did not finish within the time that was given."""

    exit_code = 3


class ServiceError(TrainError):
    """A rollout service did not do what it was asked."""


class ServiceUnavailable(ServiceError):
    """The rollout service does not answer, or it is shutting down."""


class ServiceRefused(ServiceError):
    """The rollout service answered, and the answer is no; asking again gives the same. `status` is its HTTP status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ServiceBusy(ServiceError):
    """The queue of the rollout service is full; `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
