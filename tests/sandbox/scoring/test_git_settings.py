"""Programs that an agent's git settings name do not run when the verifier uses git in the workspace.

The same shell lines as in a sandbox, on a repository of this machine.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sandbox.scoring.hardening import GIT_SETTINGS, RESET_GIT, RUN_BY_GIT, Prepared, Scan, git_settings, verifier_env

#: What an agent writes, each with a command of git's that would run it.
WAYS = {
    "a filter's clean": ('[filter "x"]\nclean = touch FORGED; cat', "git status"),
    "a filter's smudge": ('[filter "x"]\nsmudge = touch FORGED; cat', "git checkout -- f"),
    "a filter's process": ('[Filter "x"]\nprocess = touch FORGED; cat', "git checkout -- f"),
    "a filter with a dot": ('[filter "a.b"]\nclean = touch FORGED; cat', "git diff"),
    "diff": ("[diff]\nexternal = touch FORGED; true", "git diff"),
    "a text conversion": ('[diff "y"]\ntextconv = touch FORGED; cat', "git diff"),
    "a diff command": ('[DIFF "y"]\ncommand = touch FORGED; true', "git diff"),
    "an inclusion": ("[include]\npath = more", "git status"),
    "a conditional inclusion": ('[includeIf "gitdir:/**"]\npath = more', "git status"),
    "a monitor": ("[core]\nfsmonitor = touch FORGED; false", "git status"),
    "signatures": ("[commit]\ngpgsign = true\n[gpg]\nprogram = ./forge", "git commit -qam b"),
    "ssh": ("[core]\nsshCommand = touch FORGED; false", "git fetch ssh://127.0.0.1/x"),
}


def git(folder: Path, command: str, env: dict[str, str]) -> None:
    subprocess.run(["sh", "-c", command], cwd=folder, env=env, capture_output=True, timeout=30, check=False)


def repository(folder: Path, settings: str, env: dict[str, str]) -> Path:
    """A repository with a changed file, whose attributes name the agent's filters."""
    git(folder.parent, f"git init -q {folder}", env)
    git(folder, "echo a > f && git add f && git -c user.name=a -c user.email=a@b commit -qm a", env)
    config = folder / ".git/config"
    config.write_text(config.read_text() + "[user]\nname = a\nemail = a@b\n[alias]\nx = status\n" + settings + "\n")
    (folder / ".git/more").write_text('[filter "x"]\nclean = touch FORGED; cat\n')
    (folder / "forge").write_text("#!/bin/sh\ntouch FORGED\n")
    (folder / "forge").chmod(0o755)
    (folder / ".git/info/attributes").write_text(f"f {'filter=a.b' if 'a.b' in settings else 'filter=x'} diff=y\n")
    (folder / "f").write_text("b\n")
    return folder


def listed(folder: Path) -> frozenset[tuple[str, str, str]]:
    """What the search finds; it looks below `folder` alone here."""
    script = GIT_SETTINGS.replace('find / "$1" /tmp /var/tmp', 'find "$1"')
    done = subprocess.run(["sh", "-c", script, "sh", str(folder), RUN_BY_GIT], capture_output=True, check=True)
    return git_settings(done.stdout.decode())


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    prepared = Prepared("agent", "/home/agent", str(tmp_path), os.environ["PATH"], Scan(), {})
    return {**verifier_env(prepared, {}, "/tests"), "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(tmp_path)}


@pytest.mark.parametrize("way", WAYS)
def test_a_program_of_the_agents_settings_does_not_run(tmp_path: Path, env: dict[str, str], way: str) -> None:
    settings, command = WAYS[way]
    made = repository(tmp_path / "made", settings, env)
    git(made, command, env)
    if "fsmonitor" not in settings:  # the verifier's environment switches that off by itself
        assert (made / "FORGED").exists(), "the attack is one"
    cleaned = repository(tmp_path / "cleaned", settings, env)
    pairs = [word for file, name, _ in listed(cleaned) for word in (file, name)]
    subprocess.run(["sh", "-c", RESET_GIT, "sh", *pairs], check=True)
    git(cleaned, command, env)
    assert not (cleaned / "FORGED").exists() and listed(cleaned) == frozenset()
    kept = (cleaned / ".git/config").read_text()
    assert "email = a@b" in kept and "x = status" in kept and "repositoryformatversion" in kept


def test_links_and_folders_of_other_names_are_searched(tmp_path: Path, env: dict[str, str]) -> None:
    made = repository(tmp_path / "made", "", env)
    other = made / "common"
    other.mkdir()
    (other / "config").write_text('[filter "x"]\nclean = a\n')
    (made / "text").write_text('[gpg "ssh"]\nprogram = b\n')
    (made / ".git/config.worktree").symlink_to("../text")
    (made / "config").mkdir()
    (made / "config/config").write_bytes(b"no settings \xff\0")
    names = {(Path(file).relative_to(made).as_posix(), name, value) for file, name, value in listed(made)}
    assert names == {("common/config", "filter.x.clean", "a"), (".git/config.worktree", "gpg.ssh.program", "b")}
