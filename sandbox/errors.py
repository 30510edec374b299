"""What can go wrong while agents run. Each error's text is one sentence that says what happened and what to do.

SandboxError
├── EngineError      the embedded model cannot be started, or ended by itself
├── TaskError        a task folder cannot be used
├── JobError         a job cannot be started: its name is taken, its options do not fit, its engine does not answer
├── RolloutError     one rollout went wrong; `category` says how, other rollouts go on
│   ├── DockerError      the Docker engine is missing, refuses access, or failed at an operation
│   ├── ImageError       an image is missing, cannot be pulled or cannot be built
│   ├── InstallError     an agent cannot be installed
│   ├── AgentError       the agent failed, broke the protocol or used up its memory, disk or time
│   │   └── BrokenSandbox    it left a sandbox in which nothing runs
│   └── VerifierError    the verifier gave no valid reward
│       └── NoReward         it ended well and wrote no reward file
└── Stopped          the user stopped the job
"""

from __future__ import annotations

from capture.errors import BenchError


class SandboxError(BenchError):
    """Root of every error raised in `sandbox`; its text is shown to users."""


class EngineError(SandboxError):
    """The embedded model cannot be started, or ended by itself."""


class TaskError(SandboxError):
    """A task folder cannot be used."""


class JobError(SandboxError):
    """A job cannot be started."""


class RolloutError(SandboxError):
    """One rollout went wrong. `category`, in `result.json`, is BenchFlow's term for the cause, where it has one."""

    category = "other"

    def __init__(self, message: str, category: str | None = None) -> None:
        super().__init__(message)
        if category is not None:
            self.category = category


class DockerError(RolloutError):
    """The Docker engine is missing, refuses access, or failed at an operation."""

    category = "infra_failure"


class ImageError(RolloutError):
    """An image is missing, cannot be pulled or cannot be built."""

    category = "sandbox_setup"


class InstallError(RolloutError):
    """An agent cannot be installed."""

    category = "install_failure"


class AgentError(RolloutError):
    """The agent failed, broke the protocol or used up its memory, disk or time."""

    category = "agent_error"


class BrokenSandbox(AgentError):
    """The agent left a sandbox in which nothing runs any more, so there is nothing to verify: the reward is 0."""


class VerifierError(RolloutError):
    """The verifier gave no valid reward."""

    category = "verifier_failure"


class NoReward(VerifierError):
    """The verifier ended well and wrote no reward file."""


class Stopped(SandboxError):
    """The user stopped the job."""


#: Categories of failures that the agent cannot cause: only these are retried with `--retries`.
INFRASTRUCTURE = frozenset({"infra_failure", "sandbox_setup", "install_failure", "api_error", "verifier_infra"})
