"""What can go wrong while agents run. Each error's text is one sentence that says what happened and what to do.

SandboxError
├── EngineError      the embedded model cannot be started, or ended by itself
├── TaskError        a task folder cannot be used
├── JobError         a job cannot be started: its name is taken, its options do not fit, its engine does not answer
├── RolloutError     one rollout went wrong; `category` says how, other rollouts go on
│   ├── DockerError      the Docker engine is missing, refuses us, or failed at something it should do
│   ├── ImageError       an image is missing, cannot be pulled or cannot be built
│   ├── InstallError     an agent cannot be installed
│   ├── AgentError       the agent failed, spoke no sense or used up its memory, disk or time
│   └── VerifierError    the verifier gave no reward that counts
└── Stopped          the user stopped the job
"""

from __future__ import annotations

from capture.errors import BenchError


class SandboxError(BenchError):
    """Root of every error raised in `sandbox`; its text is fit for people."""


class EngineError(SandboxError):
    """The embedded model cannot be started, or ended by itself."""


class TaskError(SandboxError):
    """A task folder cannot be used."""


class JobError(SandboxError):
    """A job cannot be started."""


class RolloutError(SandboxError):
    """One rollout went wrong. `category` is BenchFlow's word for how, where it has one, and stands in `result.json`."""

    category = "other"

    def __init__(self, message: str, category: str | None = None) -> None:
        super().__init__(message)
        if category is not None:
            self.category = category


class DockerError(RolloutError):
    """The Docker engine is missing, refuses us, or failed at something it should do."""

    category = "infra_failure"


class ImageError(RolloutError):
    """An image is missing, cannot be pulled or cannot be built."""

    category = "sandbox_setup"


class InstallError(RolloutError):
    """An agent cannot be installed."""

    category = "install_failure"


class AgentError(RolloutError):
    """The agent failed, spoke no sense or used up its memory, disk or time."""

    category = "agent_error"


class VerifierError(RolloutError):
    """The verifier gave no reward that counts."""

    category = "verifier_failure"


class Stopped(SandboxError):
    """The user stopped the job."""


#: Categories of failures that are not the policy's doing: only these are tried again with `--retries`.
INFRASTRUCTURE = frozenset(
    {"infra_failure", "sandbox_setup", "install_failure", "pipe_closed", "api_error", "verifier_infra"}
)
