"""What stands between an agent and a forged reward: its own user before; cleaned files, a pinned environment after.

The order matters. `prepare` runs before the agent: it is somebody else than root, `/logs/verifier` does not exist,
tests and solution are not there. `clean` runs when every process of the agent is proved gone, before the tests arrive.
An agent that is root (a task may say so) defeats the first half; `--verifier-sandbox separate` is the answer to that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from sandbox.containers.base import Sandbox, run
from sandbox.containers.local import LocalSandbox
from sandbox.errors import DockerError, VerifierError

SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Files that Python or pytest run unasked when they lie in the right place.
AUTORUN = ("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth")
#: What would shadow pytest itself where it is run from the workspace.
SHADOWS = ("pytest.py", "pytest", "_pytest", "pluggy", "iniconfig")
BUDGET = 180.0

PREPARE = r"""
set -eu
user=$1 work=$2
if ! grep -q "^$user:" /etc/passwd; then
  id=10001
  while grep -q "^[^:]*:[^:]*:$id:" /etc/passwd /etc/group; do id=$((id + 1)); done
  echo "$user:x:$id:$id::/home/$user:/bin/sh" >> /etc/passwd
  echo "$user:x:$id:" >> /etc/group
  mkdir -p "/home/$user"; chown "$id:$id" "/home/$user"; chmod 700 "/home/$user"
fi
mkdir -p "$work" /logs/agent /logs/artifacts
for kept in "$work" /output /outputs; do
  if [ -d "$kept" ] && [ ! -L "$kept" ]; then chown -R -h "$user" "$kept"; fi
done
chown root:root /logs; chmod 755 /logs; chown "$user" /logs/agent /logs/artifacts
rm -rf /logs/verifier
for locked in /oracle /solution /verifier /tests /testbed_verify; do
  if [ -d "$locked" ] && [ ! -L "$locked" ]; then chown root:root "$locked"; chmod 700 "$locked"; fi
done
grep "^$user:" /etc/passwd
"""

#: Run as the agent: directories of PATH in which it can change nothing, nor in any directory above.
UNWRITABLE = r"""
IFS=:
for dir in $PATH; do
  at=$dir ok=1
  case $dir in /*) ;; *) continue ;; esac
  [ -d "$dir" ] || continue
  while [ -n "$at" ]; do if [ -w "$at" ]; then ok=0; fi; at=${at%/*}; done
  if [ $ok = 1 ]; then printf '%s\n' "$dir"; fi
done
"""

#: What could trip a verifier: names that Python or pytest run unasked, anywhere; behind a \1, links that leave the
#: workspace for anything but the system's own folders, and files that are none, as "path\0target\0".
SCAN = r"""
work=$1; shift
find / "$work" /tmp /var/tmp -xdev \( "$@" \) -print0 2>/dev/null
find /tmp /var/tmp -xdev -name "*.py" -print0 2>/dev/null
for shadow in SHADOWS; do if [ -e "$work/$shadow" ]; then printf "%s\0" "$work/$shadow"; fi; done
printf "\1\0"
find "$work" -xdev \( -type l -o -type p -o -type s -o -type b -o -type c \) -exec sh -c '
work=$0
for path do
  target=
  if [ -L "$path" ]; then
    target=$(readlink -f "$path" || true)
    case $target in "$work"|"$work"/*|/usr/*|/bin/*|/sbin/*|/lib/*|/lib64/*|/opt/*) continue ;; esac
  fi
  printf "%s\0%s\0" "$path" "$target"
done' "$work" {} +
""".replace("SHADOWS", " ".join(SHADOWS))

RESET = r"""
set -eu
work=$1 user=$2; shift 2
for dir in /logs /logs/verifier; do if [ -L "$dir" ]; then rm -f "$dir"; fi; done
rm -rf /logs/verifier /oracle /solution /verifier /tests
mkdir -p /logs/verifier
chown root:root /logs; chmod 755 /logs; chown "$user" /logs/verifier
if [ -d "$work" ] && [ ! -L "$work" ]; then chown -R -h root "$work"; fi
"""


@dataclass(frozen=True)
class Scan:
    """What `SCAN` found."""

    names: frozenset[str] = frozenset()
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """How the sandbox was when the agent began; `clean` needs it."""

    user: str
    home: str
    workdir: str
    #: PATH for the verifier: the image's own, without what the agent could change.
    path: str
    #: What could trip the verifier and was there before the agent: names, and links with their targets.
    before: Scan
    #: Those of them that the agent can reach, as archives to put back.
    kept: dict[str, bytes]


def prepare(sandbox: Sandbox, user: str, *, cleanup_conftests: bool = True) -> Prepared:
    """Makes the agent's user, gives it the workspace, closes what it must not see. Raises `DockerError`."""
    if isinstance(sandbox, LocalSandbox):  # this machine's own users and folders are left alone
        return Prepared("", str(sandbox.root), sandbox.workdir, os.environ.get("PATH", SAFE_PATH), Scan(), {})
    done = run(sandbox, ["sh", "-c", PREPARE, "sh", user, sandbox.workdir], timeout=BUDGET)
    if done.exit_code != 0:
        raise DockerError(f"the sandbox cannot be prepared: {done.tail() or 'no answer in time'}", "sandbox_setup")
    home = done.stdout.decode().strip().rsplit(":", 2)[-2]
    listed = run(sandbox, ["sh", "-c", UNWRITABLE], user=user, timeout=BUDGET)
    path = ":".join(listed.stdout.decode().split("\n")).strip(":") if user != "root" else ""
    before = scan(sandbox, cleanup_conftests)
    reach = (f"{sandbox.workdir}/", f"{home}/", "/tmp/", "/var/tmp/", "/output/", "/outputs/")  # noqa: S108 - in the sandbox
    kept = {name: data for name in before.names if name.startswith(reach) and (data := sandbox.get(name, 64 << 20))}
    return Prepared(user, home, sandbox.workdir, path or SAFE_PATH, before, kept)


def clean(
    sandbox: Sandbox, prepared: Prepared, *, verifier_user: str = "root", cleanup_conftests: bool = True
) -> list[str]:
    """Takes out what the agent left for the verifier to trip over, and returns what that was.

    To be called when the agent's processes are gone: nothing here is safe against one that still runs.
    Raises `VerifierError` when it cannot be done in `BUDGET` seconds.
    """
    if isinstance(sandbox, LocalSandbox):
        sandbox.make_clean()
        return []
    found = scan(sandbox, cleanup_conftests)
    doomed = set(found.names - prepared.before.names)
    doomed |= {name for name, target in found.links.items() if prepared.before.links.get(name) != target}
    if doomed:
        _must(sandbox, ["rm", "-rf", "--"], sorted(doomed))
    _must(sandbox, ["sh", "-c", RESET, "sh", prepared.workdir, verifier_user], ())
    for name, archive in prepared.kept.items():
        run(sandbox, ["sh", "-c", 'rm -rf -- "$1"; mkdir -p "${1%/*}"', "sh", name])
        sandbox.put(archive, str(PurePosixPath(name).parent))
    return sorted(doomed)


def scan(sandbox: Sandbox, conftests: bool = True) -> Scan:
    """What lies in the sandbox that could trip a verifier. Raises `VerifierError` when that takes too long."""
    tests = [word for name in AUTORUN if conftests or name != "conftest.py" for word in ("-o", "-name", name)][1:]
    done = run(sandbox, ["sh", "-c", SCAN, "sh", sandbox.workdir, *tests], timeout=BUDGET, limit=64 << 20)
    if done.exit_code is None or done.dropped:
        raise VerifierError("the sandbox holds too many files to be searched for what would trip the verifier")
    files, _, links = done.stdout.decode(errors="surrogateescape").partition("\1\0")
    words = links.split("\0")[:-1]
    return Scan(frozenset(files.split("\0")[:-1]), dict(zip(words[::2], words[1::2], strict=True)))


def verifier_env(
    prepared: Prepared, own: dict[str, str], verifier_dir: str, plugins: Iterable[str] = ()
) -> dict[str, str]:
    """The verifier's environment: the task's own variables, then ours over them."""
    addopts = f"-c /dev/null --confcutdir={verifier_dir} --rootdir={prepared.workdir} -p no:cacheprovider"
    inside_root = prepared.workdir == "/root" or prepared.workdir.startswith("/root/")
    return {
        **own,
        "PATH": prepared.path,
        "HOME": "/nonexistent" if inside_root else "/root",
        "USER": "root",
        "LD_PRELOAD": "",
        "BASH_ENV": "",
        "ENV": "",
        "PYTHONPATH": "",
        "PYTHONHOME": "",
        "PYTHONSTARTUP": "",
        "PYTHONNOUSERSITE": "1",
        "PYTHONBREAKPOINT": "0",
        "PYTHONPYCACHEPREFIX": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": " ".join([addopts, *(f"-p {name}" for name in plugins)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        # A repository's own settings can name programs that git runs.
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": "false",
        "GIT_CONFIG_KEY_1": "core.hooksPath",
        "GIT_CONFIG_VALUE_1": "/dev/null",
    }


def _must(sandbox: Sandbox, command: list[str], names: Iterable[str], at_once: int = 200) -> None:
    rest = list(names)
    while True:
        done = run(sandbox, [*command, *rest[:at_once]], timeout=BUDGET)
        if done.exit_code != 0:
            raise VerifierError(f"the sandbox cannot be cleaned for the verifier: {done.tail() or 'no answer in time'}")
        rest = rest[at_once:]
        if not rest:
            return
