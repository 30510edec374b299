"""What the project says about itself is true: make targets, the bench command, the README's commands and links."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from bench import commands as bench_commands
from capture.command.lazy import LazyCommand
from tests.forked import run_command
from tests.train.build import make_job

ROOT = Path(__file__).parents[1]

DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_command(["bench", *arguments], cwd=ROOT, env=environment)


HEAVY = {
    "acp", "datasets", "docker", "httpx", "jsonschema", "numpy", "prometheus_client", "pyarrow", "requests", "rich",
    "starlette", "tokenizers", "torch", "transformers", "uvicorn", "xllamacpp", "yaml",
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "may_load"),
    [
        ("--version", set()),
        ("--help", set()),
        ("train --help", set()),
        ("train token-coverage JOB", set()),
        ("train stream JOB --no-follow", set()),
        ("train convert JOB -o OUT", set()),
        ("view JOB --text", {"rich"}),
    ],
)
def test_a_command_loads_only_what_it_uses(tmp_path: Path, words: str, may_load: set[str]) -> None:
    """`acp` alone takes most of a second to load."""
    job = make_job(tmp_path / "job", [{}])
    words = words.replace("JOB", str(job)).replace("OUT", str(tmp_path / "rows.jsonl"))
    script = (
        "import atexit, sys, bench\n"
        "loaded = lambda: print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)\n"
        "atexit.register(loaded)\n"
        "bench.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.splitlines()[-1].split()) & HEAVY - may_load == set()


@functools.cache
def commands() -> dict[str, set[str]]:
    """Every command of `bench`, groups included (`train stream`), with its options."""
    found: dict[str, set[str]] = {}

    def walk(command: object, path: str) -> None:
        command = command.load() if isinstance(command, LazyCommand) else command
        for name, below in getattr(command, "commands", {}).items():
            walk(below, f"{path} {name}".strip())
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}  # type: ignore[attr-defined]
        found[path] = options | {"--help"}

    walk(get_command(bench_commands()), "")
    return found


def shown_commands(document: str) -> list[list[str]]:
    """The words after `$ ` in the document's console blocks, continuation lines joined."""
    text = (ROOT / document).read_text(encoding="utf-8")
    lines = []
    for block in re.findall(r"```(?:console|sh|shell|bash)\n(.*?)```", text, re.S):
        joined = block.replace("\\\n", " ")
        lines += [
            line.removeprefix("$ ").split("#")[0].split() for line in joined.splitlines() if line.startswith("$ ")
        ]
    return [line for line in lines if line]


def test_the_version_is_declared_once() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    answer = bench("--version")
    assert (answer.returncode, answer.stdout) == (0, f"bench {version}\n")


def test_a_mistake_of_the_users_is_a_sentence_and_code_2(tmp_path: Path) -> None:
    answer = bench("train", "stream", str(tmp_path / "nowhere"), "--no-follow")
    assert answer.returncode == 2
    assert "nowhere" in answer.stderr and "Traceback" not in answer.stderr


def test_help_cuts_no_names_on_a_narrow_terminal() -> None:
    for words, names in (
        (("train", "convert"), ("--include-errored", "--group-advantage", "--require-plain-sampling")),
        (("run",), ("BENCHFLOW_PROVIDER_BASE_URL", "BENCHFLOW_CAPTURE_TOKEN_LOGPROBS=1")),
        (("proxy",), ("CAPTURE_FIRST_BYTE_TIMEOUT", "OUT/default/trajectory/llm_trajectory.jsonl")),
    ):
        output = bench(*words, "--help", COLUMNS="80").stdout
        assert [name for name in names if name not in output] == []


def test_an_internal_error_is_reported_as_a_bug() -> None:
    script = "from capture.command.edge import run; run('bench', lambda: lambda **_: 1 / 0)"
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 70
    assert "ZeroDivisionError" in answer.stderr and "BENCH_DEBUG=1" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_every_target_is_a_recipe_that_make_can_plan() -> None:
    plan = subprocess.run(["make", "-n", *sorted(TARGETS)], cwd=ROOT, capture_output=True, text=True)
    assert plan.returncode == 0, plan.stderr


def made(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make` in a folder that holds nothing but the Makefile and pyproject.toml."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # not `make test`'s
    return subprocess.run(
        ["make", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )


def test_make_help_has_a_sentence_for_every_target(tmp_path: Path) -> None:
    answer = made(tmp_path, "help")
    assert (answer.returncode, answer.stderr) == (0, "")
    values = [line.split(maxsplit=2) for line in answer.stdout.splitlines()]
    assert {words[1] for words in values} == TARGETS and all(len(words) == 3 for words in values)
    assert not (tmp_path / ".venv").exists()


def test_an_old_python_is_named_before_anything_is_installed(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$1" in -V) echo "Python 3.9.1";; *) exit 1;; esac\n')
    old.chmod(0o755)
    answer = made(tmp_path, "test", f"PYTHON={old}")
    assert answer.returncode != 0
    assert "Python 3.11 or newer is needed" in answer.stderr and "Python 3.9.1" in answer.stderr
    assert not (tmp_path / ".venv").exists()


def test_no_python_at_all_is_a_sentence(tmp_path: Path) -> None:
    answer = made(tmp_path, "demo", "PYTHON=")
    assert answer.returncode != 0
    assert "Python 3.11 or newer is needed: install it" in answer.stderr


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text()
    assert "\nmake check\n" in text and "\nmake test\n" in text
    assert ["make", "test"] in shown_commands("README.md") and ["make", "demo"] in shown_commands("README.md")


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("16 of 16 rollouts\n", 0),
        ("Exception ignored in: <function HTTPResponse.__del__>\n", 1),
        ("Traceback (most recent call last):\n  File\n", 1),
        ("RuntimeWarning: coroutine 'Pool.close' was never awaited\n", 1),
        ("bench/x.py:3: DeprecationWarning: utcnow() is deprecated\n", 1),
    ],
)
def test_ci_fails_for_unintended_output(output: str, code: int) -> None:
    watched = re.search(r"^watched\(\) \{.*?^\}", (ROOT / ".ci/run").read_text(), re.M | re.S)
    assert watched is not None
    script = f'set -euo pipefail\n{watched[0]}\nwatched printf "%s" "$1"'
    done = subprocess.run(["bash", "-c", script, "bash", output], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and output in done.stdout


def test_ci_finds_the_oldest_and_the_newest_python(tmp_path: Path) -> None:
    """Of 3.9, 3.11.2, 3.13.0, 3.12.1 and a pre-release of 3.14, the second and the third."""
    found = re.search(r"^pythons\(\) \{.*?^\}", (ROOT / ".ci/run").read_text(), re.M | re.S)
    assert found is not None
    for version in ("3.9.18", "3.11.2", "3.13.0", "3.12.1", "3.14.0rc1"):
        python = tmp_path / f"versions/{version}/bin/python3"
        python.parent.mkdir(parents=True)
        level = "candidate" if "rc" in version else "final"
        numbers = tuple(map(int, version.removesuffix("rc1").split(".")))
        python.write_text(
            f'#!/bin/sh\n(echo \'import sys; sys.version_info = type("V", (tuple,), dict(releaselevel="{level}"))'
            f'({numbers}); sys.executable = "{python}"\'; cat) | exec {sys.executable} -\n'
        )
        python.chmod(0o755)
    only_ours = found[0].replace("/usr/bin/python3 python3 python3.{11..20} ", "")
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail\n{only_ours}\npythons"], env={**os.environ, "PYENV_ROOT": str(tmp_path)},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["3.11.2", "3.12.1", "3.13.0"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_in_the_documents_exists(document: str) -> None:
    known = commands()
    unknown = []
    for words in shown_commands(document):
        if words[0] == "make" and len(words) > 1:
            unknown += [" ".join(words)] if words[1] not in TARGETS else []
        if words[0] in ("bench", ".venv/bin/bench"):
            path = max((p for p in known if words[1 : 1 + len(p.split())] == p.split()), key=len)
            options = {word.split("=")[0] for word in words if word.startswith("--")}
            if not path and options - known[""]:
                unknown.append(" ".join(words))
            unknown += [f"bench {path} {option}" for option in sorted(options - known[path])]
    assert not unknown


def test_the_reference_is_what_the_commands_say() -> None:
    from tests.reference import render

    assert (ROOT / "docs/reference.md").read_text() == render(), "write it anew with: make docs"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_into_the_repository_leads_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, fragment = link.partition("#")
        if "://" in link:
            continue
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists() or (fragment and fragment not in headings(target)):
            broken.append(link)
    assert not broken


def headings(document: Path) -> set[str]:
    return {anchor(line) for line in re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.M)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_of_the_repository_that_a_document_names_exists(document: str) -> None:
    """Paths in backticks below a folder of ours, but for the NAMEs of recipes and a task's own `tests/test.sh`."""
    text = (ROOT / document).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:benchmarks|capture|docs|proxy|sandbox|tests(?!/test\.sh)|train)/[\w./-]*)`", text)
    assert [path for path in paths if "NAME" not in path and not (ROOT / path).exists()] == []


def test_the_layout_answers_twelve_questions_with_a_file_each() -> None:
    table = (ROOT / "docs/layout.md").read_text(encoding="utf-8").partition("## Where is …?")[2].partition("\n## ")[0]
    questions = [line for line in table.splitlines()[4:] if line.startswith("|")]
    assert len(questions) == 12
    assert [line for line in questions if not re.search(r"\| `[\w./]+/[\w./]*`", line)] == []


def test_the_troubleshooting_table_quotes_messages_that_are_really_printed() -> None:
    """The longest piece of each quoted message between `…` is in the code (strings broken over lines are joined)."""
    rooms = ("capture", "proxy", "sandbox", "train")
    sources = [ROOT / "Makefile", ROOT / "tests/conftest.py", *(p for room in rooms for p in modules(room))]
    code = "".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in sources)
    table = (ROOT / "docs/troubleshooting.md").read_text().partition("## Messages")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)`", table, re.M)
    missing = [message for message in quoted if max(message.split("…"), key=len).strip() not in code]
    assert quoted and not missing


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_no_merge_was_left_half_done() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60)
    if listed.returncode:
        pytest.skip("not a git checkout")
    marks = (b"\n<<<<<<< ", b"\n>>>>>>> ")
    paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
    assert not [path for path in paths if path.is_file() and any(mark in b"\n" + path.read_bytes() for mark in marks)]
