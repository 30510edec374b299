"""What a sandbox reaches: with an allow list only its hosts, and never another sandbox."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import docker
import httpx
import pytest

from sandbox.containers.egress_proxy import EgressProxy
from sandbox.containers.network import gateway_of
from tests.sandbox.support import attempt, bridge_address, make_task

pytestmark = pytest.mark.docker

FETCH = """python3 - <<'END'
import urllib.request
for url in URLS:
    try:
        print(url, urllib.request.urlopen(url, timeout=2).status)
    except Exception as error:
        print(url, getattr(error, "code", "none"))
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    direct.open(URLS[0], timeout=1)
    print("DIRECT")
except OSError:
    print("no way but the proxy")
END"""


@pytest.fixture
def servers(docker_client: docker.DockerClient) -> Iterator[list[str]]:
    """Two web servers that are not this host: containers on Docker's own bridge."""
    made = [
        docker_client.containers.run("python:3.12-slim", ["python3", "-m", "http.server", "80"], detach=True)
        for _ in range(2)
    ]
    try:
        addresses = []
        for container in made:
            container.reload()
            addresses.append(container.attrs["NetworkSettings"]["IPAddress"])
        yield addresses
    finally:
        for container in made:
            container.remove(force=True)


def test_an_allow_list_opens_its_hosts_and_no_other(tmp_path: Path, servers: list[str]) -> None:
    allowed, other = servers
    gateway = allowed.rsplit(".", 1)[0] + ".1"  # this host: on the list, and refused all the same
    urls = [f"http://{allowed}/", f"http://{other}/", f"http://{gateway}/", f"http://{allowed}:8000/"]
    task = make_task(tmp_path, sandbox=f"network_mode: allowlist\nallowed_hosts: ['{allowed}', '{gateway}']")
    seen = attempt(tmp_path, task, FETCH.replace("URLS", repr(urls)))
    assert seen.said.splitlines() == [
        f"{urls[0]} 200", f"{urls[1]} 403", f"{urls[2]} 502", f"{urls[3]} 403", "no way but the proxy",
    ]  # fmt: skip


def test_an_engine_published_on_dockers_bridge_as_in_the_seed_is_out_of_reach(
    tmp_path: Path, docker_client: docker.DockerClient
) -> None:
    """`docker run -p $BRIDGE:8000:8000`: this host reaches it there, a sandbox neither there nor at its own address."""
    bridge = bridge_address()
    engine = docker_client.containers.run(
        "python:3.12-slim", ["python3", "-m", "http.server", "8000"], detach=True, ports={"8000/tcp": (bridge, None)}
    )
    try:
        for _ in range(50):
            engine.reload()
            if engine.attrs["NetworkSettings"]["Ports"].get("8000/tcp"):
                break
            time.sleep(0.1)
        port = engine.attrs["NetworkSettings"]["Ports"]["8000/tcp"][0]["HostPort"]
        published, own = f"http://{bridge}:{port}/", f"http://{engine.attrs['NetworkSettings']['IPAddress']}:8000/"
        for _ in range(50):
            try:
                assert httpx.get(published, trust_env=False).status_code == 200
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        else:
            pytest.fail("the published server never answered this host")
        script = FETCH.replace("URLS", repr([published, own]))
        seen = attempt(tmp_path, make_task(tmp_path, sandbox="network_mode: public"), script)
    finally:
        engine.remove(force=True)
    assert seen.said.splitlines() == [f"{published} none", f"{own} none", "no way but the proxy"]


def test_an_allow_list_is_for_its_own_sandbox() -> None:
    egress = EgressProxy("127.0.0.1")
    try:
        token = egress.env(["packages.example.com", "*.example.org"])["HTTPS_PROXY"].split(":")[2].partition("@")[0]
        two = egress.env(["code.example.net"])["HTTPS_PROXY"].split(":")[2].partition("@")[0]
        assert egress.allows(token, "Packages.Example.com.") and egress.allows(token, "a.b.example.org")
        assert not egress.allows(token, "example.org") and not egress.allows(token, "evilpackages.example.com")
        assert not egress.allows(two, "packages.example.com") and egress.allows(two, "code.example.net")
        assert not egress.allows("", "packages.example.com")
    finally:
        egress.close()


def test_sandboxes_of_one_job_do_not_reach_each_other(tmp_path: Path, docker_client: docker.DockerClient) -> None:
    """Each serves a page and looks for its neighbours'; `public`, where they have the internet."""
    import io

    from sandbox.rollouts.job import JobOptions, run_job
    from sandbox.rollouts.plan import RolloutPlan
    from sandbox.rollouts.progress import Progress
    from tests.sandbox.support import ShellAgent

    script = """python3 - <<'END'
import http.server, socket, threading, time, urllib.request
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
threading.Thread(target=http.server.HTTPServer(("", 8080), Page).serve_forever, daemon=True).start()
mine = socket.gethostbyname(socket.gethostname())
assert urllib.request.urlopen(f"http://{mine}:8080/", timeout=30).status == 200
time.sleep(2)
for last in range(2, 6):
    there = mine.rsplit(".", 1)[0] + f".{last}"
    if there != mine:
        try:
            urllib.request.urlopen(f"http://{there}:8080/", timeout=1); raise SystemExit(f"REACHED {there}")
        except OSError: pass
open("answer.txt", "w").write("42")
END"""
    tasks = [make_task(tmp_path, name=f"t{n}") for n in range(3)]
    plan = RolloutPlan(job="j", agent=ShellAgent(script), provider=None)
    ended = run_job(plan, tasks, JobOptions(tmp_path / "jobs", concurrency=3), Progress(io.StringIO(), live=False))
    values = [path.read_text() for path in (tmp_path / "jobs/j").glob("*/agent/*.txt")]
    assert ended.summaries[0]["passed"] == 3, values


def test_the_default_bridges_address_is_known_from_its_subnet() -> None:
    """As Docker 20.10 tells it when it was started without --bip: a subnet and no gateway."""
    assert gateway_of({"IPAM": {"Config": [{"Subnet": "172.17.0.0/16"}]}}) == "172.17.0.1"
    assert gateway_of({"IPAM": {"Config": [{"Subnet": "172.18.0.0/16", "Gateway": "172.18.0.9/16"}]}}) == "172.18.0.9"
    assert gateway_of({"IPAM": {"Config": []}}) == ""
