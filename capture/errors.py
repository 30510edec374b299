"""What can go wrong on the ground floor. Each error's text is one sentence that says what happened and what to do.

CaptureError
├── JournalError          a journal cannot be opened, written or read
│   └── JournalClosed     a line was offered to a journal that is sealed
├── RecordError           a value cannot be a token capture (the message names the field)
└── FileFormatError       a file of a job folder is not what its name says
"""


class CaptureError(Exception):
    """Root of every error raised in `capture`; its text is fit for people."""


class JournalError(CaptureError):
    """A journal cannot be opened, written or read."""


class JournalClosed(JournalError):
    """A line was offered to a journal that is sealed."""


class RecordError(CaptureError):
    """A value cannot be a token capture."""


class FileFormatError(CaptureError):
    """A file of a job folder is not what its name says."""
