"""What an agent breaks is its own doing: it is judged by what it left, never retried, and nothing stays behind."""

from __future__ import annotations

import io
import json
from typing import Any

import docker
import pytest

from sandbox.containers import reaper
from sandbox.containers.docker import connect
from sandbox.errors import INFRASTRUCTURE
from sandbox.rollouts.job import JobOptions, run_job
from sandbox.rollouts.plan import RolloutPlan
from sandbox.rollouts.progress import Progress
from tests.sandbox.support import ByTask, make_task

pytestmark = [pytest.mark.usefixtures("docker_client"), pytest.mark.docker]

DEEP = """python3 - <<'END'
import os
os.chdir("{folder}")
for _ in range({depth}):
    os.mkdir("{name}"); os.chdir("{name}")
END
exit 0"""
Results = dict[str, list[dict[str, Any]]]
ROOT = {"agent": "user: root"}
SEPARATE = {"verifier": "sandbox_mode: separate"}
#: What the agent does, and its task.
DAMAGE: dict[str, tuple[str, dict[str, str]]] = {
    "log-of-250-letters": ("touch /logs/agent/$(printf 'x%.0s' $(seq 250)); exit 0", {}),
    "log-of-no-utf-8": ("touch /logs/agent/$(printf 'a\\377'); exit 0", {}),
    "deep-logs": (DEEP.format(folder="/logs/agent", depth=400, name="d"), {}),
    "deep-long-logs": (DEEP.format(folder="/logs/agent", depth=60, name="d" * 250), {}),
    "deep-workspace": (DEEP.format(folder="/app", depth=5000, name="d"), {}),
    "deep-workspace-separate": (DEEP.format(folder="/app", depth=5000, name="d"), SEPARATE),
    "deep-temporary-folder": (DEEP.format(folder="/tmp", depth=5000, name="d"), {}),
    "sparse-file": ("truncate -s 9G /app/big; exit 0", {}),
    "sparse-file-separate": ("truncate -s 9G /app/big; exit 0", SEPARATE),
    "sparse-logs": ("truncate -s 9G /logs/agent/big; exit 0", {}),
    "many-logs": ("cd /logs/agent && python3 -c '[open(str(i), \"w\").close() for i in range(20000)]'; exit 0", {}),
    "killed-itself": ("kill -9 $$", {}),
    "ended-the-sandbox": ("kill -9 -1; kill 1; sleep 5; kill -9 1; exit 1", ROOT),
    "no-names-of-users": ("rm -f /etc/passwd /etc/group; exit 0", ROOT),
    "no-shell": ("cp /bin/false /bin/sh; exit 0", ROOT),
    "nothing-to-search-with": ("rm -rf /bin/sh /usr/bin/find /bin/rm /usr/bin/tar; exit 0", ROOT),
    "nothing-that-starts": ("rm -f /bin/sleep /usr/bin/sleep; exit 0", ROOT),
    "special-files": ("mkfifo /logs/agent/f; mknod /logs/agent/d c 1 5; mknod /app/z b 7 0; exit 0", ROOT),
    "names-with-line-ends": (
        "cd /app && touch \"$(printf 'a\\n//\\n')\" -- -rf && ln -s /etc \"$(printf 'l\\n')\"; exit 0",
        {},
    ),
    "no-workspace": ("rm -rf /app/* /app/.[!.]*; mv /app /app2; ln -s /nowhere /app; exit 0", ROOT),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, docker_client: docker.DockerClient) -> Results:
    """The results of each task, of all attempts of a job that retries."""
    folder = tmp_path_factory.mktemp("damage")
    tasks = [make_task(folder, name=name, **{"sandbox": "workdir: /app", **task}) for name, (_, task) in DAMAGE.items()]
    plan = RolloutPlan(job="job", agent=ByTask({name: script for name, (script, _) in DAMAGE.items()}), provider=None)
    run_job(plan, tasks, JobOptions(folder / "jobs", retries=1), Progress(io.StringIO(), live=False))
    found: Results = {name: [] for name in DAMAGE}
    for path in (folder / "jobs/job").glob("*/result.json"):
        result = json.loads(path.read_text())
        found[result["task_name"]].append(result)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DAMAGE)
def test_what_the_agent_broke_is_judged_and_not_retried(results: Results, name: str) -> None:
    (result,) = results[name]
    assert result["rewards"] == {"reward": 0.0}, result
    assert result["error_category"] not in INFRASTRUCTURE and result["verifier_error"] is None


def test_nothing_of_them_stays_behind(results: Results) -> None:
    api = connect()
    own = {"label": f"{reaper.OWNER}={reaper.owner()}"}
    assert api.containers(all=True, filters=own) == [] and api.networks(filters=own) == []


def test_thousands_of_logs_are_copied_up_to_a_limit(results: Results) -> None:
    (result,) = results["many-logs"]
    assert result["timing"]["total"] < 240, "each was synced to the disk, which took minutes"
