"""What can go wrong on the ground floor. Each error's text is one sentence that says what happened and what to do.

BenchError                root of every package's errors; `exit_code` is what a command ends with
CaptureError
├── JournalError          a journal cannot be opened, written or read
│   └── JournalClosed     a line was offered to a journal that is sealed
├── LockError             a lock file cannot be written
│   └── LockHeld          the lock is held by another process (in `capture.lock`)
├── RecordError           a value cannot be a token capture (the message names the field)
├── FileFormatError       a file of a job folder is not what its name says
└── JsonError             a text is not JSON
"""


class BenchError(Exception):
    """Root of the errors of all packages that a person reads; the command line prints the text and exits."""

    exit_code = 2


class CaptureError(BenchError):
    """Root of every error raised in `capture`; its text is fit for people."""


class JournalError(CaptureError):
    """A journal cannot be opened, written or read."""


class JournalClosed(JournalError):
    """A line was offered to a journal that is sealed."""


class LockError(CaptureError):
    """A lock file cannot be written."""


class RecordError(CaptureError):
    """A value cannot be a token capture."""


class FileFormatError(CaptureError):
    """A file of a job folder is not what its name says."""


class JsonError(CaptureError):
    """A text is not JSON."""
