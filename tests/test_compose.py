"""compose.yaml with the real compose binary, and with stand-in images on a real Docker engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from openai import AuthenticationError, DefaultHttpxClient, OpenAI

from capture.journal.journal import JournalReader
from capture.journal.layout import JOURNAL

ROOT = Path(__file__).parents[1]
PROXY_IMAGE = "benchflow-sidecar:test"
ENGINE_IMAGE = "benchflow-sidecar-fake-engine:test"


def compose(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The compose binary that the test extra brings, on our file, in an empty environment but for what is given."""
    binary = shutil.which("docker-compose", path=str(Path(sys.executable).parent)) or "docker-compose"
    inherited = {key: os.environ[key] for key in ("PATH", "HOME", "DOCKER_HOST") if key in os.environ}
    return subprocess.run(
        [binary, "--file", ROOT / "compose.yaml", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def configured(**environment: str) -> dict[str, Any]:
    answer = compose("config", "--format", "json", **environment)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_the_engine_runs_with_the_flags_that_were_measured() -> None:
    engine = configured()["services"]["vllm"]
    assert engine["image"] == "vllm/vllm-openai-cpu:v0.33.0-x86_64"
    assert " ".join(engine["command"]) == (
        "Qwen/Qwen2.5-0.5B-Instruct --served-model-name my-policy --host 0.0.0.0 --port 8000 --dtype float32 "
        "--max-model-len 32768 --enable-auto-tool-choice --tool-call-parser hermes --api-key dummy-key"
    )
    assert engine["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert engine["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert int(engine["shm_size"]) == 4 * 1024**3
    assert engine["volumes"][0]["source"] == "hf-cache"


def test_only_the_proxys_port_is_published_and_only_on_loopback() -> None:
    services = configured()["services"]
    published = {
        name: [(port["host_ip"], port["published"]) for port in service.get("ports", [])]
        for name, service in services.items()
    }
    assert published == {"vllm": [], "captures": [], "proxy": [("127.0.0.1", "8100")]}


def test_the_proxy_waits_for_a_healthy_engine() -> None:
    services = configured()["services"]
    assert services["proxy"]["depends_on"]["vllm"]["condition"] == "service_healthy"
    assert "/health" in " ".join(services["vllm"]["healthcheck"]["test"])


def test_images_model_and_keys_are_overridable() -> None:
    services = configured(
        VLLM_IMAGE="mine/vllm:1",
        PROXY_IMAGE="mine/proxy:2",
        MODEL="org/model",
        SERVED_MODEL_NAME="policy-7",
        VLLM_API_KEY="engine-key",
        CAPTURE_KEY="agent-key",
        CAPTURE_PORT="9100",
        CAPTURE_DIR="/data/captures",
    )["services"]
    engine, proxy = services["vllm"], services["proxy"]
    assert (engine["image"], proxy["image"]) == ("mine/vllm:1", "mine/proxy:2")
    assert engine["command"][0] == "org/model" and {"policy-7", "engine-key"} <= set(engine["command"])
    assert proxy["environment"]["CAPTURE_UPSTREAM_KEY"] == "engine-key"
    assert proxy["environment"]["CAPTURE_KEY"] == "agent-key"
    assert proxy["ports"][0]["published"] == "9100" and proxy["volumes"][0]["source"] == "/data/captures"


@dataclass(frozen=True)
class Stack:
    client: OpenAI
    captures: Path
    project: str


@pytest.fixture(scope="module")
def stack(docker_client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The whole file, up and healthy, with FakeEngine in the place of vLLM's image and the real proxy image."""
    # The SDK speaks to the legacy builder, which has no BuildKit features.
    docker_client.images.build(path=str(ROOT / "tests/docker/fake_engine"), tag=ENGINE_IMAGE, rm=True)
    docker_client.images.build(path=str(ROOT), tag=PROXY_IMAGE, rm=True)
    captures = tmp_path_factory.mktemp("host") / "captures"
    captures.mkdir()
    project = f"compose-test-{uuid.uuid4().hex[:8]}"
    user = os.getuid() or 1000
    environment = {
        "VLLM_IMAGE": ENGINE_IMAGE,
        "PROXY_IMAGE": PROXY_IMAGE,
        "CAPTURE_DIR": str(captures),
        "CAPTURE_PORT": "0",
        "CAPTURE_UID": str(user),
        "CAPTURE_GID": str(os.getgid() or 1000),
    }
    try:
        up = compose("-p", project, "up", "--detach", "--wait", "--no-build", **environment)
        logs = compose("-p", project, "logs", **environment)
        assert up.returncode == 0, up.stderr + logs.stdout
        where = compose("-p", project, "port", "proxy", "8100", **environment).stdout.strip()
        assert where.startswith("127.0.0.1:")
        http = DefaultHttpxClient(trust_env=False)
        with OpenAI(base_url=f"http://{where}/v1", api_key="capture-key", max_retries=0, http_client=http) as client:
            yield Stack(client, captures, project)
    finally:
        compose("-p", project, "down", "--volumes", "--timeout", "5", **environment)


def test_a_call_through_the_published_port_lands_in_the_host_folder(stack: Stack) -> None:
    stream = stack.client.chat.completions.create(
        model="my-policy", messages=[{"role": "user", "content": "Go."}], stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    journal = stack.captures / "default" / JOURNAL
    call = list(JournalReader(journal))[-1]
    assert text == "Four tokens"
    assert call.capture is not None and call.capture.complete
    assert call.capture.completions[0].token_ids.tolist() == [25470, 288, 19234, 2]
    assert journal.stat().st_uid == (os.getuid() or 1000)


def test_another_key_than_the_proxys_is_refused(stack: Stack) -> None:
    with pytest.raises(AuthenticationError):
        stack.client.with_options(api_key="dummy-key").models.list()


def test_the_proxy_runs_without_root_and_without_capabilities(stack: Stack, docker_client: docker.DockerClient) -> None:
    (proxy,) = docker_client.containers.list(
        filters={"label": [f"com.docker.compose.project={stack.project}", "com.docker.compose.service=proxy"]}
    )
    assert proxy.attrs["State"]["Health"]["Status"] == "healthy"
    code, output = proxy.exec_run(["grep", "-E", "^(Uid|CapEff):", "/proc/1/status"])
    assert code == 0
    uid, capabilities = (line.split()[1] for line in output.decode().splitlines())
    assert int(uid) != 0 and int(capabilities, 16) == 0
