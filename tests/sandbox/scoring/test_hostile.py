"""Agents that cheat, in real containers. None of them gets a reward that it did not earn, nor what is not its own.

Every attack leaves answer.txt wrong, so a reward of 1 can only be a forged one.
"""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from sandbox.containers import reaper
from sandbox.containers.docker import connect
from sandbox.containers.pool import DockerPool
from sandbox.embedded_engine import EmbeddedEngine
from sandbox.errors import JobError
from sandbox.rollouts.model_endpoint import Provider
from tests.sandbox.support import TEST_SH, Seen, ShellAgent, attempt, attempt_all, bridge_address, make_task

pytestmark = [pytest.mark.usefixtures("docker_client"), pytest.mark.docker]

SILENT = "#!/bin/bash\nexit 0\n"  # a verifier that writes nothing: only a plant could count
ATTACKS: dict[str, tuple[str, dict[str, str]]] = {}
Test = Callable[..., None]


def attack(script: str, *, of: str = "", **task: str) -> Callable[[Test], Test]:
    """A shell script that an agent runs before a test looks at what came of it (`seen`); all run in one job."""

    def register(test: Test) -> Test:
        ATTACKS[test.__name__ + of] = (script, task)
        return test

    return register


@pytest.fixture(scope="module")
def attacks(tmp_path_factory: pytest.TempPathFactory, docker_client: docker.DockerClient) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("attacks")
    names = {test: f"attack-{number:02d}" for number, test in enumerate(ATTACKS)}
    tasks = [make_task(folder, name=names[test], **task) for test, (_, task) in ATTACKS.items()]
    seen = attempt_all(folder, {names[test]: script for test, (script, _) in ATTACKS.items()}, tasks)
    return {test: seen[name] for test, name in names.items()}


@pytest.fixture
def seen(request: pytest.FixtureRequest, attacks: dict[str, Seen]) -> Seen:
    return attacks[request.node.name]


@attack(
    """
    mkdir -p /logs/verifier && echo MADE; echo 1 > /logs/verifier/reward.txt && echo WRITTEN
    echo 1 > /logs/agent/reward.txt; echo 1 > /logs/artifacts/reward.txt; exit 0
    """,
    test=SILENT,
)
def test_a_planted_reward_file_does_not_count(seen: Seen) -> None:
    assert seen.reward is None
    assert "No reward file found" in seen.result["verifier_error"]
    assert "MADE" not in seen.said and "WRITTEN" not in seen.said


@attack(
    """
    mkdir -p /tmp/mine; echo 1 > /tmp/mine/reward.txt
    ln -sfn /tmp/mine /logs/verifier; mv /logs /logs2; rm -rf /logs; ln -s /tmp/mine /logs/agent/verifier; exit 0
    """,
    test=SILENT,
)
def test_a_planted_link_for_the_verifiers_folder_does_not_count(seen: Seen) -> None:
    assert seen.reward is None


@attack(
    """
    mkdir -p /verifier /tests /tmp/mine; echo 1 > /tmp/mine/reward.txt
    ln -sfn /tmp/mine /logs/verifier
    printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n' > /verifier/test.sh
    chmod +x /verifier/test.sh; cp /verifier/test.sh /tests/
    """,
    agent="user: root",
)
def test_a_root_agent_that_plants_links_and_tests_finds_them_replaced(seen: Seen) -> None:
    assert seen.reward == 0.0


@attack("echo 1 > /app/mine.txt", test="#!/bin/bash\nln -s /app/mine.txt /logs/verifier/reward.txt\n")
def test_a_reward_that_is_a_link_is_not_followed(seen: Seen) -> None:
    assert seen.reward is None


@attack(
    """
    find / -xdev -name test.sh -o -xdev -name solve.sh 2>/dev/null | sed s/^/FOUND/
    for dir in /verifier /tests /oracle /solution; do mkdir $dir 2>/dev/null && echo MADE; done; exit 0
    """,
    **{"oracle/solve.sh": "#!/bin/bash\necho SECRET-ANSWER\n"},
)
def test_tests_and_solution_are_not_there_to_read_or_to_patch(seen: Seen) -> None:
    assert seen.reward == 0.0
    assert "FOUND" not in seen.said and "MADE" not in seen.said


AUTORUN = ("conftest.py", "sitecustomize.py", "usercustomize.py", "evil.pth")
FORGE = "import os; open('/logs/verifier/reward.txt', 'w').write('1'); os._exit(0)"
SPREAD = """
for dir in /app /app/sub /tmp "$HOME/.local/lib/python3.12/site-packages" /usr/local/lib/python3.12/site-packages
do mkdir -p $dir 2>/dev/null; echo "FORGE" > $dir/NAME; done 2>/dev/null; exit 0
""".replace("FORGE", FORGE)
LOOK = """#!/bin/bash
cd /app && PYTHONPATH=/app:/tmp python3 -c pass; python3 -c pass
find /app /tmp /usr/local -name 'NAME'
[ -e /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt
"""


@pytest.mark.parametrize("name", AUTORUN)
def test_files_that_python_runs_unasked_are_gone_before_the_verifier(seen: Seen, name: str) -> None:
    assert seen.reward == 0.0
    assert {f"/app/{name}", f"/app/sub/{name}"} <= set(seen.result["hardening"]["removed"])
    assert name not in (seen.folder / "verifier" / "test-stdout.txt").read_text()


for _name in AUTORUN:
    attack(SPREAD.replace("NAME", _name), of=f"[{_name}]", test=LOOK.replace("NAME", _name))(
        test_files_that_python_runs_unasked_are_gone_before_the_verifier
    )


@attack(
    """
    echo "open('/logs/verifier/reward.txt', 'w').write('1')" | tee pytest.py > json.py
    mkdir _pytest; touch _pytest/__init__.py
    mkdir -p venv/lib/pytest; exit 0
    """,
    test="#!/bin/bash\npython3 -m pytest\n[ -e /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt\n",
)
def test_a_module_that_would_shadow_pytest_is_gone_before_the_verifier(seen: Seen) -> None:
    assert seen.reward == 0.0
    assert seen.result["hardening"]["removed"] == ["/app/_pytest", "/app/pytest.py"]


HONEST = {
    "test": "#!/bin/bash\ngrep -q honest /app/conftest.py && echo 1 > /logs/verifier/reward.txt\n",
    "sandbox": "setup_commands: ['echo honest > /app/conftest.py']\nworkdir: /app",
}


@attack("echo forged > /app/conftest.py", **HONEST)
def test_a_conftest_of_the_task_itself_that_was_changed_comes_back_as_it_was(seen: Seen) -> None:
    assert seen.reward == 1.0


@attack("rm /app/conftest.py", **HONEST)
def test_a_conftest_of_the_task_itself_that_was_deleted_comes_back(seen: Seen) -> None:
    assert seen.reward == 1.0


@attack(
    """
    printf '%s\\n' "trap '' TERM HUP INT" 'while :; do echo 1 > /logs/verifier/reward.txt; echo 42 > /app/answer.txt' \
      'done 2>/dev/null' > /tmp/later.sh
    setsid nohup bash /tmp/later.sh >/dev/null 2>&1 &
    (setsid nohup bash /tmp/later.sh >/dev/null 2>&1 &) ; sleep 0.5; [ -e answer.txt ] && echo AT WORK; exit 0
    """,
    test="#!/bin/bash\nrm -f /app/answer.txt; sleep 0.7; ls /app\n" + TEST_SH[12:],
)
def test_a_background_process_does_not_live_to_write_the_reward(seen: Seen) -> None:
    assert seen.said == "AT WORK\n"
    assert seen.reward == 0.0
    assert (seen.folder / "verifier" / "test-stdout.txt").read_text() == ""


@attack(
    """
    for dir in /app/bin /usr/local/bin "$HOME/.local/bin" /tmp/bin; do mkdir -p $dir
      for tool in tr cat bash python3; do
        printf '#!/bin/sh\\necho 42\\n' > $dir/$tool && chmod +x $dir/$tool; done; done 2>/dev/null
    for file in ~/.bashrc ~/.profile ~/.bash_profile /root/.bashrc /root/.profile /etc/profile
    do echo 'export PATH=/app/bin:$PATH' > $file; done 2>/dev/null; exit 0
    """,
    test='#!/bin/bash -l\necho "$PATH"\n' + TEST_SH[12:],
    sandbox="workdir: /app\nenv: {PATH: '/app/bin:/usr/local/bin:/usr/bin:/bin'}",
)
def test_a_poisoned_path_and_shell_start_files_do_not_reach_the_verifier(seen: Seen) -> None:
    assert seen.reward == 0.0
    path = (seen.folder / "verifier" / "test-stdout.txt").read_text()
    assert "/usr/bin" in path and "/app/bin" not in path


@attack(
    """
    ln -s /verifier/expected.txt /app/answer.txt; ln -s ../verifier /app/v; mkfifo /app/pipe
    ln -s /usr/bin/env /app/env; ln -s note.txt /app/inside; echo 1 > /app/note.txt
    """,
    test="""#!/bin/bash
echo 42 > /verifier/expected.txt
if cmp -s /app/answer.txt /verifier/expected.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
""",
)
def test_links_out_of_the_workspace_and_pipes_are_taken_out_of_it(seen: Seen) -> None:
    """A link to where the expected answer will be would otherwise be compared with itself, by root."""
    assert seen.reward == 0.0
    assert seen.result["hardening"]["removed"] == ["/app/answer.txt", "/app/pipe", "/app/v"]


@attack(
    "exit 0",
    test="#!/bin/bash\nenv; echo 0 > /logs/verifier/reward.txt\n",
    verifier="env: {PYTHONPATH: /app, PYTEST_ADDOPTS: -p evil, MINE: kept}",
)
def test_the_verifiers_environment_is_pinned(seen: Seen) -> None:
    """What git, pytest and Python would read from the agent's files is switched off by variables of ours."""
    env = dict(line.split("=", 1) for line in (seen.folder / "verifier" / "test-stdout.txt").read_text().splitlines())
    assert (env["GIT_CONFIG_KEY_0"], env["GIT_CONFIG_VALUE_0"]) == ("core.fsmonitor", "false")
    assert env["PYTEST_ADDOPTS"].startswith("-c /dev/null --confcutdir=/verifier")
    assert "evil" not in env["PYTEST_ADDOPTS"]
    assert (env["PYTHONPATH"], env["PYTHONNOUSERSITE"], env["MINE"]) == ("", "1", "kept")


@attack(
    """python3 - <<'END'
import socket
for host, port in (("1.1.1.1", 53), ("8.8.8.8", 443)):
    try:
        socket.create_connection((host, port), timeout=1)
        print("OPEN", host)
    except OSError:
        print("closed", host)
END""",
    sandbox="network_mode: no-network",
)
def test_no_network_has_no_way_out(seen: Seen) -> None:
    assert seen.said == "closed 1.1.1.1\nclosed 8.8.8.8\n"


class Listener:
    """An HTTP server of this host, as any other program of the machine would run one."""

    def __init__(self, host: str) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"REACHED")

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer((host, 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def listeners() -> Iterator[tuple[Listener, Listener]]:
    """One bound to every address, one to Docker's bridge, where the seed publishes its engine."""
    both = Listener("0.0.0.0"), Listener(bridge_address())
    yield both
    for listener in both:
        listener.close()


REACH = """python3 - <<'END'
import socket, struct, urllib.request
routes = [line.split() for line in open("/proc/net/route")][1:]
near = {socket.inet_ntoa(struct.pack("<L", int(r[2], 16))) for r in routes if r[2] != "00000000"}
near |= {socket.inet_ntoa(struct.pack("<L", int(r[1], 16) | 0x1000000)) for r in routes if r[1] != "00000000"}
for target in TARGETS + [f"{gateway}:{PORT}" for gateway in near]:
    try:
        print(target, urllib.request.urlopen("http://" + target, timeout=1).read())
    except Exception as error:
        print(target, "refused", type(error).__name__)
END"""


@pytest.mark.parametrize("mode", ["public", "no-network"])
def test_ports_of_this_host_are_out_of_reach(tmp_path: Path, listeners: tuple[Listener, Listener], mode: str) -> None:
    everywhere, bridge = listeners
    own = socket.gethostbyname(socket.gethostname())
    targets = [f"{bridge_address()}:{everywhere.port}", f"{bridge_address()}:{bridge.port}", f"{own}:{everywhere.port}"]
    script = REACH.replace("TARGETS", repr(targets)).replace("PORT", str(everywhere.port))
    seen = attempt(tmp_path, make_task(tmp_path, sandbox=f"network_mode: {mode}"), script)
    assert "REACHED" not in seen.said
    assert seen.said.count("refused") >= 4, seen.said


PROBE = """python3 - <<'END'
import json, os, urllib.error, urllib.request
base, key = os.environ["BENCHFLOW_PROVIDER_BASE_URL"], os.environ["BENCHFLOW_PROVIDER_API_KEY"]
root = base[:-len("/v1")]
def ask(name, url, key, body=None):
    headers = {"Content-Type": "application/json", **({"Authorization": "Bearer " + key} if key else {})}
    try:
        print("ASKED", name, urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).status)
    except urllib.error.HTTPError as error:
        print("ASKED", name, error.code)
    except OSError as error:
        print("ASKED", name, "none")
chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
ask("own", base + "/chat/completions", key, chat)
ask("other", base + "/chat/completions", "OTHER-KEY", chat)
ask("none", base + "/chat/completions", "", chat)
ask("upstream", base + "/chat/completions", "UPSTREAM" + "-SECRET", chat)
for path in ("/sessions", "/metrics", "/admin/sessions", "/s/default/v1/models", "/../sessions"):
    ask("admin:" + path, root + path, key)
ask("admin:open", root + "/sessions", key, b"{}")
print("KEY", key)
END
echo ENVIRONMENT; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'
echo MOUNTS; cat /proc/mounts; ls /var/run/docker.sock /run/docker.sock 2>/dev/null | sed 's/^/SOCKET /'
grep -rl UPSTREAM'-'SECRET /proc/*/environ /etc /opt /home /app /logs /tmp 2>/dev/null | sed 's/^/LEAK /'; exit 0
"""


def asked(text: str) -> dict[str, str]:
    return {line.split()[1]: line.split()[2] for line in text.splitlines() if line.startswith("ASKED")}


def provider_of(engine: EmbeddedEngine) -> Provider:
    return Provider(f"llamacpp/{engine.model}", "llamacpp", engine.model, engine.base_url, "UPSTREAM-SECRET", True)


def test_a_key_reaches_its_own_session_and_nothing_else(tmp_path: Path, engine: EmbeddedEngine) -> None:
    """Neither another rollout's calls nor the admin routes; the engine's key and address are nowhere in the sandbox."""
    provider, task = provider_of(engine), make_task(tmp_path, agent="timeout_sec: 200")
    seen = attempt(tmp_path, task, ShellAgent(PROBE, needs_model=True), provider=provider)
    result = asked(seen.said)
    assert (result["own"], result["other"], result["none"], result["upstream"]) == ("200", "401", "401", "401"), (
        seen.said
    )
    assert {answer for name, answer in result.items() if name.startswith("admin:")} <= {
        "401",
        "403",
        "404",
        "405",
        "none",
    }
    assert "LEAK" not in seen.said and "SOCKET" not in seen.said
    assert "UPSTREAM-SECRET" not in seen.said and engine.base_url.partition("//")[2].partition("/")[0] not in seen.said
    key = seen.said.partition("KEY ")[2].split()[0]
    for path in seen.folder.rglob("*"):
        assert not path.is_file() or not any(s in path.read_bytes() for s in (key.encode(), b"UPSTREAM-SECRET")), path
    # The next rollout finds the key of this one: it opens nothing any more.
    again = attempt(
        tmp_path, task, ShellAgent(PROBE.replace("OTHER-KEY", key), needs_model=True), provider=provider, job="b"
    )
    assert (asked(again.said)["own"], asked(again.said)["other"]) == ("200", "401")


def test_an_engines_key_among_the_agents_variables_is_refused(tmp_path: Path) -> None:
    provider = Provider("vllm/m", "vllm", "m", "http://10.0.0.9:8000/v1", "UPSTREAM-SECRET", True)
    agent = ShellAgent("exit 0", needs_model=True)
    with pytest.raises(JobError, match="OPENAI_API_KEY would carry the engine's address or key into the sandbox"):
        attempt(
            tmp_path, make_task(tmp_path), agent, provider=provider, agent_env={"OPENAI_API_KEY": "UPSTREAM-SECRET"}
        )


def test_a_fork_bomb_stays_in_its_own_sandbox(tmp_path: Path) -> None:
    script = "f() { f | f & }; f; sleep 1; for i in $(seq 200); do sleep 60 & done; wait"
    task = make_task(tmp_path, sandbox="pids: 64\nmemory_mb: 256", agent="timeout_sec: 4")
    seen = attempt(tmp_path, task, script)
    assert seen.reward == 0.0 and seen.result["error_category"] in ("timeout", "pids_exhausted")


class QuickDiskWatch(DockerPool):
    disk_watch_seconds = 0.3


def test_a_filled_disk_ends_the_rollout_not_the_machine(tmp_path: Path) -> None:
    script = "for i in $(seq 1000); do head -c 8M /dev/zero > /tmp/f$i; sleep 0.05; done"
    task = make_task(tmp_path, sandbox="storage_mb: 100", agent="timeout_sec: 60")
    seen = attempt(tmp_path, task, script, make_pool=QuickDiskWatch)
    assert seen.result["error_category"] == "disk_full"
    assert "more than the sandbox's 100 MB of disk" in seen.result["error"]


def test_time_cannot_be_bought(tmp_path: Path) -> None:
    """Ignoring every signal, stopping itself, forking away: the prompt's budget ends all the same."""
    script = "trap '' TERM INT HUP; (trap '' TERM INT HUP; while :; do sleep 1; done) & kill -STOP $$; sleep 100"
    seen = attempt(tmp_path, make_task(tmp_path, agent="timeout_sec: 2"), script)
    assert seen.result["error"] == "Agent prompt exceeded wall-clock budget 2s"
    assert (seen.result["error_category"], seen.reward) == ("timeout", 0.0)


def test_nothing_of_them_is_left(docker_client: docker.DockerClient) -> None:
    api = connect()
    ours = {"label": f"{reaper.OWNER}={reaper.owner()}"}
    assert api.containers(all=True, filters=ours) == [] and api.networks(filters=ours) == []
