"""What can go wrong between logs and trainers. Each error's text is one sentence that says what happened and what to do.

TrainError                exit code 2
├── NoSuchPath            a path that was given is not there
├── BadInput              an option or a file cannot be used as it is
├── JobStopped            exit code 1: the job was stopped, or its process died, before it finished
└── StreamTimeout         exit code 3: the job did not finish within the time that was given
"""

from __future__ import annotations


class TrainError(Exception):
    """Root of every error raised in `train`; its text is fit for people."""

    exit_code = 2


class NoSuchPath(TrainError):
    """A path that was given is not there."""


class BadInput(TrainError):
    """An option or a file cannot be used as it is."""


class JobStopped(TrainError):
    """The job was stopped, or its process died, before it finished."""

    exit_code = 1


class StreamTimeout(TrainError):
    """The job did not finish within the time that was given."""

    exit_code = 3
