"""Code of the agent's does not run as the verifier: each way in which programs load code from their working directory.

Every agent leaves a wrong answer and plants a file that writes a reward of 1 when it is run.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import docker
import pytest

from sandbox.containers.base import run
from sandbox.containers.docker import Container, Limits, connect
from sandbox.scoring import hardening
from tests.sandbox.support import Seen, attempt_all, make_task

pytestmark = [pytest.mark.usefixtures("docker_client"), pytest.mark.docker]

FORGE = "import os; open('/logs/verifier/reward.txt', 'w').write('1'); os._exit(0)"
#: Stands in for pytest, which the test images lack: imports what pytest imports.
PYTEST = {
    "verifier/lib/pytest/__init__.py": "",
    "verifier/lib/pytest/__main__.py": "import argparse, pluggy, iniconfig, _pytest\n",
    "verifier/lib/pluggy/__init__.py": "",
    "verifier/lib/iniconfig/__init__.py": "",
    "verifier/lib/_pytest/__init__.py": "",
}
RUN_PYTEST = "PYTHONPATH=/verifier/lib python3 -m pytest"
NODE_FORGE = "require(`fs`).writeFileSync(`/logs/verifier/reward.txt`, `1`); process.exit(0)"
SH_FORGE = "echo 1 > /logs/verifier/reward.txt; exit 0"


def plant(path: str, text: str = FORGE) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}\nEND\nchmod +x {path}; exit 0"


def compiled(name: str) -> str:
    source = plant("/tmp/source").removesuffix("exit 0")
    return f"{source}python3 -c \"import py_compile; py_compile.compile('/tmp/source', '/app/{name}')\"; exit 0"


#: What the agent does, and what the verifier runs before it writes a reward of 0.
WAYS = {
    "python -c": (plant("/app/json.py"), "python3 -c 'import json'"),
    "python from standard input": (plant("/app/json.py"), "echo 'import json' | python3 -"),
    "python -m of the standard library": (plant("/app/argparse.py"), "python3 -m json.tool --help"),
    "a package instead of a module": (plant("/app/json/__init__.py"), "python3 -c 'import json'"),
    "a compiled module": (compiled("json.pyc"), "python3 -c 'import json'"),
    "a module for startup": (plant("/app/sitecustomize.py"), "python3 -c pass"),
    "a path file": (plant("/app/x.pth", f"import sys; exec({FORGE!r})"), "python3 -c pass"),
    "pytest's plugin manager": (plant("/app/pluggy.py"), RUN_PYTEST),
    "pytest's ini reader": (plant("/app/iniconfig.py"), RUN_PYTEST),
    "pytest itself, compiled": (compiled("pytest.pyc"), RUN_PYTEST),
    "pytest's inner package": (plant("/app/_pytest/__init__.py"), RUN_PYTEST),
    "a module that pytest imports": (plant("/app/argparse.py"), RUN_PYTEST),
    "a command in the working directory": (plant("/app/cat", f"#!/bin/sh\n{SH_FORGE}"), "cat /dev/null"),
    "a file that . finds": (plant("/app/setup", SH_FORGE), "sh -c '. setup' || true"),
    "a shared library": (plant("/app/libc.so.6", "not a library"), "ls >/dev/null || { " + SH_FORGE + "; }"),
    "a folder of CDPATH": (plant("/app/lib/setup", SH_FORGE), "cd / && cd lib && [ -f setup ] && . ./setup"),
    "a module of Node.js": (plant("/app/node_modules/fs/index.js", NODE_FORGE), "node -e 'require(`fs`)'"),
    "an installed package of Node.js": (
        plant("/app/node_modules/npm/index.js", NODE_FORGE),
        "NODE_PATH=/usr/local/lib/node_modules node -e 'try { require(`npm`) } catch {}'",
    ),
    "Node.js from standard input": (
        plant("/app/node_modules/path/index.js", NODE_FORGE),
        "echo 'require(`path`)' | node -",
    ),
    "npm's configuration": (
        plant("/app/.npmrc", "node-options=--require /app/forge.js").removesuffix("exit 0")
        + plant("/app/forge.js", NODE_FORGE),
        "npm --version",
    ),
}  # fmt: skip
IMAGE_ENV = {
    "a command in the working directory": "env: {PATH: ':.:/usr/local/bin:/usr/bin:/bin'}",
    "a file that . finds": "env: {PATH: '.::/usr/local/bin:/usr/bin:/bin'}",
    "a shared library": "env: {LD_LIBRARY_PATH: '/usr/lib:'}",
    "a folder of CDPATH": "env: {CDPATH: /app}",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, docker_client: docker.DockerClient) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("shadows")
    names = {way: f"way-{number:02d}" for number, way in enumerate(WAYS)}
    tasks = []
    for way, (_, command) in WAYS.items():
        node = "node" in command or "npm" in command
        image = f"docker_image: {'node' if node else 'python'}:{'20' if node else '3.12'}-slim\nworkdir: /app\n"
        test = (
            f"#!/bin/bash\ncd /app\n{command}\n[ -e /logs/verifier/reward.txt ] || echo 0 > /logs/verifier/reward.txt\n"
        )
        tasks.append(make_task(folder, name=names[way], test=test, sandbox=image + IMAGE_ENV.get(way, ""), **PYTEST))
    results = attempt_all(folder, {names[way]: script for way, (script, _) in WAYS.items()}, tasks)
    return {way: results[name] for way, name in names.items()}


@pytest.mark.parametrize("way", WAYS)
def test_a_planted_file_does_not_run_as_the_verifier(seen: dict[str, Seen], way: str) -> None:
    assert seen[way].reward == 0.0, seen[way].result


def test_a_task_may_put_the_workspace_on_the_path_again(tmp_path: Path) -> None:
    command = "#!/bin/bash\ncd /app && python3 -c 'import answer' && echo 1 > /logs/verifier/reward.txt\n"
    tasks = [
        make_task(tmp_path, name="safe", test=command, sandbox="workdir: /app"),
        make_task(
            tmp_path, name="own", test=command, sandbox="workdir: /app", verifier="hardening: {safe_path: false}"
        ),
    ]
    results = attempt_all(tmp_path, dict.fromkeys(("safe", "own"), "touch answer.py"), tasks)
    assert (results["safe"].reward, results["own"].reward) == (None, 1.0)


def test_without_a_safe_path_modules_that_hide_others_are_removed(tmp_path: Path) -> None:
    """As in images whose Python is older than 3.11: the standard library's and the verifier's names are protected."""
    (tmp_path / "helpers.py").touch()
    sandbox = Container.start(
        connect(), "python:3.12-slim", name="benchflow-test-shadows", limits=Limits(), labels={}, network="none",
        workdir="/app",
    )  # fmt: skip
    try:
        prepared = hardening.prepare(sandbox, "agent")
        assert prepared.importable == hardening.PYTEST_MODULES, "3.12 has PYTHONSAFEPATH"
        old = dataclasses.replace(prepared, importable=hardening.PYTEST_MODULES | {"json", "queue"})
        files = "json/__init__.py json.cpython-38.so queue.pyc helpers.py answer.py data/__init__.py"
        run(sandbox, ["sh", "-c", f"cd /app; mkdir json data; touch {files}"], user="agent")
        assert hardening.clean(sandbox, old, verifier_dir=tmp_path) == [
            "/app/helpers.py", "/app/json", "/app/json.cpython-38.so", "/app/queue.pyc",
        ]  # fmt: skip
    finally:
        sandbox.remove()
