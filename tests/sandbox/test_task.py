"""A task folder is read whole, and a mistake in it is said with file, key and cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.errors import TaskError
from sandbox.tasks.scaffold import write_task
from sandbox.tasks.task import find_tasks, load_task

TASKS = Path(__file__).parent / "tasks"

SEED = """---
schema_version: "1.3"
metadata:
  author_name: BenchFlow docs
  category: demo
  tags: [rl, token-capture]
sandbox:
  docker_image: python:3.12-slim
  workdir: /app
agent:
  timeout_sec: 300
verifier:
  timeout_sec: 60
---
# write-number

## prompt

Write the number 42 to the file `/app/answer.txt`.
"""


def make(folder: Path, task_md: str = SEED, name: str = "write-number") -> Path:
    path = folder / name
    (path / "verifier").mkdir(parents=True)
    (path / "verifier" / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    (path / "task.md").write_text(task_md)
    return path


def make_toml(folder: Path, toml: str, instruction: str = "Do it.\n") -> Path:
    path = folder / "old"
    (path / "tests").mkdir(parents=True)
    (path / "tests" / "test.sh").write_text("#!/bin/bash\n")
    (path / "task.toml").write_text(toml)
    (path / "instruction.md").write_text(instruction)
    return path


def test_the_seeds_task_is_read_as_it_stands(tmp_path: Path) -> None:
    task = load_task(make(tmp_path))
    assert task.name == "write-number" and task.layout == "native"
    assert task.prompt == "Write the number 42 to the file `/app/answer.txt`."
    assert task.sandbox.docker_image == "python:3.12-slim" and task.sandbox.workdir == "/app"
    assert task.agent.timeout_sec == 300 and task.verifier.timeout_sec == 60
    assert task.sandbox.network_mode == "public"


def test_digest_changes_with_content_and_with_name_but_not_with_time(tmp_path: Path) -> None:
    first = load_task(make(tmp_path / "a")).digest
    again = make(tmp_path / "b")
    (again / "task.md").touch()
    assert load_task(again).digest == first
    (again / "verifier" / "more.py").write_text("")
    renamed = load_task(again).digest
    assert renamed != first
    (again / "verifier" / "more.py").rename(again / "verifier" / "less.py")
    assert load_task(again).digest != renamed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("timeout_sec: 300", "timout_sec: 300"), "unknown key agent.timout_sec; did you mean timeout_sec?"),
        (("docker_image:", "dockerimage:"), "unknown key sandbox.dockerimage; did you mean docker_image?"),
        (("verifier:\n", "verifer:\n"), "unknown key verifer; did you mean verifier?"),
        (("sandbox:\n", "environment:\n"), "the section environment: is called sandbox:"),
        (("timeout_sec: 300", "timeout_sec: -1"), "agent.timeout_sec must be greater than 0"),
        (("timeout_sec: 300", "timeout_sec: .nan"), "agent.timeout_sec must be a finite number"),
        (("timeout_sec: 300", "timeout_sec: soon"), "agent.timeout_sec must be a number, not 'soon'"),
        (("timeout_sec: 300", "timeout_sec: true"), "agent.timeout_sec must be a number, not True"),
        (("timeout_sec: 300", "user: ../root"), "agent.user must be a user name"),
        (("workdir: /app", "workdir: app"), "workdir must be an absolute path"),
        (("workdir: /app", "network_mode: no_network"), "did you mean no-network?"),
        (("workdir: /app", "gpus: 1"), "sandbox.gpus is not supported here"),
        (("workdir: /app", "mcp_servers: [{name: x}]"), "sandbox.mcp_servers is not supported here"),
        (("workdir: /app", "memory: lots"), "sandbox.memory must be a size such as 2G"),
        (
            ("workdir: /app", "allowed_hosts: [example.com]"),
            "allowed_hosts has no effect with network_mode public",
        ),
        (("  timeout_sec: 60", "  type: llm-judge"), "verifier.type 'llm-judge' is not supported here"),
        (("  timeout_sec: 60", "  reward_range: [0, 0.5]"), "reward_range must be [low, high]"),
        (("  timeout_sec: 60", "  hardening: {cleanup_conftest: false}"), "did you mean cleanup_conftests?"),
        (("## prompt\n", "## Prompt\n\n## prompt\n"), "duplicate section ## prompt"),
        (("## prompt\n", "## role:critic\n"), "section ## role:critic is not supported here"),
        (("\nWrite the number 42 to the file `/app/answer.txt`.\n", "\n"), "has no prompt"),
        (("## prompt\n\nWrite the number 42 to the file `/app/answer.txt`.\n", ""), "has no prompt"),
        (("Write the number 42 to the file `/app/answer.txt`.\n", "<!-- to\n do -->\n"), "has no prompt"),
        (("---\nschema", "schema"), "must start with YAML frontmatter"),
        (("tags: [rl", "tags: [[rl"), "the frontmatter is not valid YAML at line"),
        (("  docker_image: python:3.12-slim\n", ""), "names no image"),
    ],
)
def test_a_mistake_is_reported_with_its_fix(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    assert change[0] in SEED
    with pytest.raises(TaskError) as error:
        load_task(make(tmp_path, SEED.replace(change[0], change[1], 1)))
    assert words in str(error.value)
    assert "Traceback" not in str(error.value)


def test_frontmatter_that_never_closes_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="frontmatter is missing closing ---"):
        load_task(make(tmp_path, "---\nagent: {}\n## prompt\nx\n"))


def test_headings_in_code_and_escaped_headings_stay_in_the_prompt(tmp_path: Path) -> None:
    body = "## prompt\n\nWrite this:\n```md\n## prompt\n```\n\\## prompt\n### detail\nend\n"
    head = SEED.partition("# write-number")[0]
    task = load_task(make(tmp_path, head + body))
    assert task.prompt == "Write this:\n```md\n## prompt\n```\n## prompt\n### detail\nend"


def test_text_before_the_first_reserved_heading_is_the_prompt_without_a_section(tmp_path: Path) -> None:
    head = SEED.partition("# write-number")[0]
    assert load_task(make(tmp_path, head + "Just do it.\n")).prompt == "Just do it."


def test_the_older_layout_is_read_with_its_own_words(tmp_path: Path) -> None:
    toml = """
version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 30.0
environment_mode = "separate"
[environment]
docker_image = "python:3.12-slim"
memory = "2G"
storage = "512M"
cpus = 2
allow_internet = false
[solution.env]
LEVEL = 3
"""
    task = load_task(make_toml(tmp_path, toml))
    assert task.layout == "harbor" and task.verifier_dir.name == "tests" and task.oracle_dir.name == "solution"
    assert (task.sandbox.memory_mb, task.sandbox.storage_mb, task.sandbox.cpus) == (2048, 512, 2.0)
    assert task.sandbox.network_mode == "no-network" and task.verifier.sandbox_mode == "separate"
    assert task.oracle.env == {"LEVEL": "3"}


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[environment]\nmemory = '2G'\nmemory_mb = 2\n", "sandbox.memory is an older spelling of memory_mb"),
        ("[environment]\n[sandbox]\n", "has both [environment] and [sandbox]"),
        ("[[steps]]\nname='a'\n", "steps is not supported here"),
        ("[environment]\nbuild_timout_sec = 3\n", "did you mean build_timeout_sec?"),
        ("[agent\n", "is not valid TOML"),
        ("[verifir]\n", "unknown key verifir; did you mean verifier?"),
    ],
)
def test_mistakes_in_task_toml(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(TaskError) as error:
        load_task(make_toml(tmp_path, toml))
    assert words in str(error.value)


def test_a_harmless_unknown_section_of_task_toml_is_a_warning(tmp_path: Path) -> None:
    task = load_task(make_toml(tmp_path, "[environment]\ndocker_image='x'\n[leaderboard]\nrank=1\n"))
    assert len(task.warnings) == 1 and "leaderboard" in task.warnings[0]


def test_an_empty_instruction_is_reported(tmp_path: Path) -> None:
    for number, text in enumerate(("  \n", "# A title\n\n")):
        with pytest.raises(TaskError, match=r"instruction\.md says nothing"):
            load_task(make_toml(tmp_path / str(number), "[environment]\ndocker_image='x'\n", text))


def test_links_in_a_task_are_refused(tmp_path: Path) -> None:
    path = make(tmp_path)
    (path / "verifier" / "data").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="is a symbolic link"):
        load_task(path)


def test_a_task_of_several_containers_is_refused_in_words(tmp_path: Path) -> None:
    path = make(tmp_path, SEED.replace("  docker_image: python:3.12-slim\n", ""))
    (path / "environment").mkdir()
    (path / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(TaskError, match="several containers"):
        load_task(path)


def test_folders_globs_and_single_tasks_are_found_once(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        make(tmp_path, name=name)
    (tmp_path / "README.md").write_text("no task")
    assert [t.name for t in find_tasks([str(tmp_path)])] == ["a", "b", "c"]
    assert [t.name for t in find_tasks([str(tmp_path / "*")])] == ["a", "b", "c"]
    assert [t.name for t in find_tasks([str(tmp_path / "c"), str(tmp_path)])] == ["c", "a", "b"]
    with pytest.raises(TaskError, match="no task matches"):
        find_tasks([str(tmp_path / "z*")])
    with pytest.raises(TaskError, match=r"give a folder that holds task\.md"):
        find_tasks([str(tmp_path / "nowhere")])


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "one")
    make(tmp_path / "two")
    with pytest.raises(TaskError, match="two tasks are named write-number"):
        find_tasks([str(tmp_path / "one"), str(tmp_path / "two")])


def test_the_task_that_init_writes_is_good(tmp_path: Path) -> None:
    write_task(tmp_path / "mine")
    assert load_task(tmp_path / "mine").sandbox.network_mode == "no-network"
    with pytest.raises(TaskError, match="is not empty"):
        write_task(tmp_path / "mine")
    with pytest.raises(TaskError, match=r"task\.md is a file; give the name of a new folder"):
        write_task(tmp_path / "mine/task.md")


@pytest.mark.parametrize("folder", sorted(p for p in TASKS.glob("*") if p.is_dir()), ids=lambda p: p.name)
def test_the_examples_beside_this_file_are_good(folder: Path) -> None:
    assert load_task(folder).prompt
