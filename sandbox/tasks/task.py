"""A task: the agent's prompt, where it works, how it is judged.

Two layouts are read: `task.md` (BenchFlow's: YAML frontmatter, then `## prompt`) and the older `task.toml` with
`instruction.md`, `tests/` and `solution/` that Harbor and Terminal-Bench use. An unknown key is an
error: a misspelled `timeout_sec` that is ignored is worse than a task that does not start.
"""

from __future__ import annotations

import glob
import hashlib
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sandbox.errors import TaskError
from sandbox.tasks.config import AgentSpec, OracleSpec, SandboxSpec, VerifierSpec, check_keys, read_section

RESERVED = re.compile(r"^## +(prompt|user-persona|role:[^\s]+|scene:[^\s]+)\s*$", re.IGNORECASE)
FENCE = re.compile(r"^\s*(```+|~~~+)")
TOP = ("schema_version", "version", "task", "metadata", "sandbox", "agent", "verifier", "oracle", "solution",
       "source", "reward", "artifacts", "steps", "agents", "scenes", "user", "benchflow")  # fmt: skip
TASK = ("name", "version", "description", "authors", "keywords")


@dataclass(frozen=True)
class Task:
    """One task folder, read and checked. Times are seconds."""

    path: Path
    name: str
    prompt: str
    sandbox: SandboxSpec
    agent: AgentSpec
    verifier: VerifierSpec
    oracle: OracleSpec
    #: `native` (task.md) or `harbor` (task.toml); decides where verifier and solution are in the sandbox.
    layout: str
    #: sha256 of the folder's relative paths and contents, sorted.
    digest: str
    warnings: tuple[str, ...] = ()

    @property
    def verifier_dir(self) -> Path:
        return self.path / ("verifier" if self.layout == "native" else "tests")

    @property
    def oracle_dir(self) -> Path:
        return self.path / ("oracle" if self.layout == "native" else "solution")

    @property
    def dockerfile(self) -> Path | None:
        path = self.path / "environment" / "Dockerfile"
        return path if path.is_file() else None


def load_task(path: Path) -> Task:
    """Reads and checks one task folder. Raises `TaskError` for the first thing that cannot be used."""
    if not path.is_dir():
        raise TaskError(
            f"no task folder {path}; give a folder that holds task.md (make one with: bench tasks init NAME)"
        )
    native, harbor = path / "task.md", path / "task.toml"
    if native.is_file():
        head, prompt = parse_task_md(_text(native), str(native))
        layout = "native"
    elif harbor.is_file():
        head, prompt = _parse_toml(harbor), _text(path / "instruction.md").strip()
        layout = "harbor"
        if not says_something(prompt, headings=False):
            raise TaskError(f"{path / 'instruction.md'} says nothing; write what the agent shall do")
    else:
        raise TaskError(f"{path} holds neither task.md nor task.toml; make a task with: bench tasks init {path.name}")
    return _build(path, layout, head, prompt)


def find_tasks(patterns: Iterable[str]) -> list[Task]:
    """Tasks of folders, of folders of tasks, and of globs, each once, sorted by path. Raises `TaskError`."""
    tasks = [load_task(path) for path in find_folders(patterns)]
    names: dict[str, Path] = {}
    for task in tasks:
        if task.name in names:
            raise TaskError(f"two tasks are named {task.name}: {names[task.name]} and {task.path}; rename one folder")
        names[task.name] = task.path
    return tasks


def find_folders(patterns: Iterable[str]) -> list[Path]:
    """The folders of those tasks, none read yet. Raises `TaskError` where there is none."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        paths = [Path(pattern)]
        if glob.has_magic(pattern):
            paths = sorted(Path(hit) for hit in glob.glob(pattern))  # noqa: PTH207 - absolute patterns too
        if not paths:
            raise TaskError(f"no task matches {pattern!r}")
        several = len(paths) > 1
        for path in paths:
            if several and not path.is_dir():
                continue  # `tasks/*` also matches a README
            for folder in _task_folders(path):
                found[folder.resolve()] = None
    return list(found)


def _task_folders(path: Path) -> Sequence[Path]:
    if not path.is_dir():
        raise TaskError(f"no task folder {path}; give a folder that holds task.md, or a folder of such folders")
    if _is_task(path):
        return [path]
    inside = sorted(child for child in path.iterdir() if child.is_dir() and _is_task(child))
    return inside or [path]  # load_task reports what is missing


def _is_task(path: Path) -> bool:
    return (path / "task.md").is_file() or (path / "task.toml").is_file()


def parse_task_md(text: str, where: str) -> tuple[dict[str, Any], str]:
    """The frontmatter and the prompt of a `task.md`. Raises `TaskError`."""
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        raise TaskError(f"{where}: task.md must start with YAML frontmatter between two lines of ---")
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    if end is None:
        raise TaskError(f"{where}: frontmatter is missing closing ---")
    try:
        head = yaml.safe_load("\n".join(lines[1:end])) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 2}" if mark else ""
        raise TaskError(
            f"{where}: the frontmatter is not valid YAML{at}: {getattr(error, 'problem', error)}"
        ) from error
    if not isinstance(head, dict):
        raise TaskError(f"{where}: frontmatter must be a mapping of keys to values")
    return head, _prompt(lines[end + 1 :], where)


def _prompt(lines: list[str], where: str) -> str:
    """The `## prompt` section; without one, the text before the first reserved heading."""
    sections: dict[str, list[str]] = {"": []}
    current, fence = "", ""
    for line in lines:
        mark = FENCE.match(line)
        if mark and (not fence or line.strip().startswith(fence)):
            fence = "" if fence else mark.group(1)
        heading = None if fence else RESERVED.match(line)
        if heading:
            current = heading.group(1).lower()
            if current in sections:
                raise TaskError(f"{where}: duplicate section ## {heading.group(1)}")
            sections[current] = []
        else:
            sections[current].append(line.replace("\\##", "##", 1) if line.startswith("\\##") else line)
    for name in sections:
        if name.startswith(("role:", "scene:")) or name == "user-persona":
            raise TaskError(f"{where}: section ## {name} is not supported here; a task has one prompt for one agent")
    prompt = "\n".join(sections.get("prompt", sections[""])).strip()
    if not says_something(prompt, headings="prompt" in sections):
        raise TaskError(f"{where} has no prompt; write what the agent shall do under a heading ## prompt")
    return prompt


def says_something(prompt: str, *, headings: bool) -> bool:
    """Whether a prompt has text besides comments and, where `headings` is False, besides titles."""
    text = re.sub(r"<!--.*?-->", "", prompt, flags=re.DOTALL)
    return any(line.strip() and (headings or not re.match(r"#{1,6}(\s|$)", line)) for line in text.splitlines())


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        head = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path} is not valid TOML: {error}") from error
    if "environment" in head and "sandbox" in head:
        raise TaskError(f"{path} has both [environment] and [sandbox]; they are two names of one section, keep one")
    if "environment" in head:
        head["sandbox"] = head.pop("environment")
    verifier = head.get("verifier")
    if isinstance(verifier, dict) and "environment_mode" in verifier:
        verifier["sandbox_mode"] = verifier.pop("environment_mode")
    return head


def _build(path: Path, layout: str, head: dict[str, Any], prompt: str) -> Task:
    where = str(path / ("task.md" if layout == "native" else "task.toml"))
    if layout == "native" and "environment" in head:
        raise TaskError(f"{where}: the section environment: is called sandbox: in task.md; rename it")
    if "oracle" in head and "solution" in head:
        raise TaskError(f"{where} has both oracle and solution; they are two names of one section, keep one")
    warnings = check_keys(head, TOP, where, "", strict=layout == "native")
    check_keys(_mapping(head, "task", where), TASK, where, "task", strict=layout == "native")
    for key in ("steps", "scenes", "agents"):
        if head.get(key):
            raise TaskError(f"{where}: {key} is not supported here; a task has one prompt for one agent")
    sandbox = read_section(SandboxSpec, _mapping(head, "sandbox", where), where, "sandbox")
    agent = read_section(AgentSpec, _mapping(head, "agent", where), where, "agent")
    verifier = read_section(VerifierSpec, _mapping(head, "verifier", where), where, "verifier")
    oracle = read_section(
        OracleSpec, _mapping(head, "oracle" if "oracle" in head else "solution", where), where, "oracle"
    )
    name = path.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise TaskError(f"{path}: a task folder's name may hold letters, digits, dots, dashes and underscores only")
    task = Task(
        path=path.resolve(), name=name, prompt=prompt, sandbox=sandbox, agent=agent, verifier=verifier, oracle=oracle,
        layout=layout, digest=_digest(path), warnings=tuple(warnings),
    )  # fmt: skip
    _check_files(task, where)
    return task


def _check_files(task: Task, where: str) -> None:
    if not (task.verifier_dir / "test.sh").is_file():
        raise TaskError(
            f"{task.path} has no {task.verifier_dir.name}/test.sh; it writes the reward to /logs/verifier/reward.txt"
        )
    if task.dockerfile is None and not task.sandbox.docker_image:
        for compose in ("docker-compose.yaml", "docker-compose.yml"):
            if (task.path / "environment" / compose).is_file():
                raise TaskError(
                    f"{task.path}/environment/{compose}: tasks of several containers are not supported here"
                )
        raise TaskError(f"{where} names no image; set sandbox.docker_image, or add environment/Dockerfile")


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    for file in sorted(path.rglob("*"), key=lambda p: p.relative_to(path).as_posix()):
        if file.is_symlink():
            raise TaskError(f"{file} is a symbolic link; a task holds plain files only, so copy what it points to")
        if file.is_file() and "__pycache__" not in file.parts:
            whole.update(file.relative_to(path).as_posix().encode() + b"\0")
            whole.update(hashlib.sha256(file.read_bytes()).digest())
    return "sha256:" + whole.hexdigest()


def _mapping(head: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = head.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TaskError(f"{where}: {key} must be a mapping of keys to values, not {value!r}")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read as UTF-8 text: {error}") from error
