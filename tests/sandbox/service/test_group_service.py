"""A policy that cannot be written down: nothing changes, unless the engine serves it already."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, cast

import pytest

from capture.journal.layout import JobDir
from proxy import Policy, SessionOptions
from sandbox.agents import find_agent
from sandbox.rollouts.plan import RolloutPlan
from sandbox.service.group_request import RequestRefused
from sandbox.service.group_service import GroupService, ServiceOptions
from sandbox.service.ledger import Ledger


@pytest.mark.parametrize(("weights", "served", "words"), [(None, "0", "not changed"), ("8.gguf", "8", "a restart")])
def test_a_policy_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str | None, served: str, words: str
) -> None:
    plan = RolloutPlan(
        job="job", agent=find_agent("mini"), provider=None, session=SessionOptions(policy_version="0"), agent_env={}
    )
    nothing = cast(Any, None)
    service = GroupService(plan, [], ServiceOptions(), nothing, Ledger(JobDir(tmp_path)), nothing, None, nothing)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RequestRefused, match=f"{words}.*No space left on device") as refused:
            service.set_policy(Policy("8"), weights)
    assert refused.value.status == 507 and service.policy_version == served
    service.close()
    ledger = Ledger(JobDir(tmp_path))
    ledger.close()
    assert ledger.policy is None  # no half of a line either
