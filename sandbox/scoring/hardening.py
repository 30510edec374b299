"""What keeps an agent from forging its reward: its own user before, cleaned files and a pinned environment after.

The order matters. `prepare` runs before the agent: the agent is not root, `/logs/verifier` does not exist, tests and
solution are not in the sandbox. `clean` runs when every process of the agent is proved gone, before the tests arrive.
An agent that is root (a task may ask for it) defeats the first half; `--verifier-sandbox separate` answers that.

The verifier runs in the workspace, whose files are the agent's. What Python, pytest, Node.js and shells load from their
working directory without being asked is taken away or switched off: the folder itself from `sys.path`
(PYTHONSAFEPATH, Python 3.11; on older ones modules of the workspace that hide another), configuration files, caches,
Node.js packages that hide an installed one, relative entries of search paths. What a verifier imports from the
workspace by name is its own decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sandbox.containers.base import Sandbox, run
from sandbox.errors import AgentError, DockerError, VerifierError

SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Files that Python, pytest or npm run, or take programs to run from, when they lie in the right place.
AUTORUN = ("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", ".npmrc")
#: pytest's own modules: removed from the workspace even where Python would not look there.
PYTEST_MODULES = frozenset({"pytest", "_pytest", "py", "pluggy", "iniconfig"})
#: Ends of the files that Python imports.
MODULE_SUFFIXES = (".py", ".pyc", ".pyo", ".so")
#: Seconds for each step.
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
if command -v python3 >/dev/null; then cd / && python3 -I -c "$3"; fi
"""

#: Names that `python3` of the image can import, one per line; nothing where it honors PYTHONSAFEPATH (3.11 and later).
IMPORTABLE = """
import pkgutil, sys
if sys.version_info < (3, 11):
    print("\\n".join({m[1] for m in pkgutil.iter_modules()} | set(sys.builtin_module_names)))
"""

#: Run as the agent: of each search path the folders in which it can change nothing, nor in any folder above.
UNWRITABLE = r"""
IFS=:
for list in "$PATH" "${LD_LIBRARY_PATH-}"; do
  for dir in $list; do
    at=$dir ok=1
    case $dir in /*) ;; *) continue ;; esac
    [ -d "$dir" ] || continue
    while [ -n "$at" ]; do if [ -w "$at" ]; then ok=0; fi; at=${at%/*}; done
    if [ $ok = 1 ]; then printf '%s:' "$dir"; fi
  done
  echo
done
"""

#: What could run in place of a verifier's own code. Names end in a \0; sections in the name //, which no file has:
#: 1. files that Python, pytest or npm run unasked, anywhere;
#: 2. links that leave the workspace for anything but the system's folders, and special files, as "path\0target\0";
#: 3. files at the top of the workspace, and the `__init__` files of its top folders;
#: 4. Node.js packages of the workspace, and 5. those that are installed for everybody.
SCAN = r"""
work=$1; shift
find / "$work" /tmp /var/tmp -xdev \( "$@" \) -print0 2>/dev/null
find /tmp /var/tmp -xdev -name "*.py" -print0 2>/dev/null
printf "//\0"
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
printf "//\0"
find "$work" -xdev -mindepth 1 -maxdepth 1 ! -type d -print0
find "$work" -xdev -mindepth 2 -maxdepth 2 -name "__init__.*" -print0
printf "//\0"
find "$work/node_modules" -mindepth 1 -maxdepth 1 -print0 2>/dev/null
printf "//\0"
IFS=:
for dir in ${NODE_PATH-} /usr/local/lib/node_modules /usr/lib/node_modules; do
  if [ -d "$dir" ]; then find "$dir" -mindepth 1 -maxdepth 1 -print0; fi
done
"""

#: Settings of repositories by which git runs programs: per file its path, then "name\nvalue" for each, then //, each
#: with a \0. The files are called `config` wherever they are (a repository's `commondir` may name any folder).
GIT_SETTINGS = r"""
command -v git >/dev/null || exit 0
cd /
find / "$1" /tmp /var/tmp -xdev \( -name config -o -name config.worktree \) ! -type d -exec sh -c '
for file do
  if [ -f "$file" ] && grep -q "^[[:space:]]*\[" "$file"; then
    printf "%s\0" "$file"
    git config --file "$file" --no-includes --null --get-regexp "$0" 2>/dev/null
    printf "//\0"
  fi
done' "$2" {} +
exit 0
"""
#: Their names, for `git config --get-regexp`. `git status`, `diff` and `checkout` run filters as whoever verifies. Not
#: here: what the environment switches off, and what runs on a terminal or when it is called by its name.
RUN_BY_GIT = (
    r"^(filter\..*\.(clean|smudge|process)|diff\.external|diff\..*\.(command|textconv)|merge\..*\.driver"
    r"|include(if\..*)?\.path|core\.(sshcommand|askpass|gitproxy|alternaterefscommand)|gpg\..*program|credential\..*"
    r"|protocol\..*|submodule\..*\.update|remote\..*\.(vcs|uploadpack|receivepack))$"
)
RESET_GIT = r"""
cd /
while [ $# -gt 1 ]; do git config --file "$1" --unset-all "$2" || true; shift 2; done
"""
KEEP_GIT = 'cd / && git config --file "$1" --add "$2" "$3"'

RESET = r"""
set -eu
work=$1 user=$2; shift 2
for dir in /logs /logs/verifier "$work"; do if [ -L "$dir" ] || [ ! -d "$dir" ]; then rm -rf "$dir"; fi; done
rm -rf /logs/verifier /oracle /solution /verifier /tests
mkdir -p /logs/verifier "$work"
chown root:root /logs; chmod 755 /logs; chown "$user" /logs/verifier
chown -R -h root "$work"
"""


@dataclass(frozen=True)
class Scan:
    """What `SCAN` found."""

    #: Files that are run unasked, and their like in temporary folders.
    names: frozenset[str] = frozenset()
    #: Links that leave the workspace, and special files, with their targets.
    links: Mapping[str, str] = field(default_factory=dict)
    #: Modules and Node.js packages of the workspace that hide others.
    shadows: frozenset[str] = frozenset()
    #: Settings by which git runs programs: `(file, name, value)`.
    git: frozenset[tuple[str, str, str]] = frozenset()


@dataclass(frozen=True)
class Prepared:
    """The sandbox as it was when the agent began; `clean` needs it."""

    user: str
    home: str
    workdir: str
    #: PATH for the verifier: the image's own, without what the agent could change.
    path: str
    #: What was there before the agent.
    before: Scan
    #: Those of the files that the agent can reach, as archives to put back.
    originals: Mapping[str, bytes]
    #: The same for LD_LIBRARY_PATH; None where the image sets none.
    library_path: str | None = None
    #: Modules that the workspace must not hide: pytest's, and all of a Python without PYTHONSAFEPATH.
    importable: frozenset[str] = PYTEST_MODULES
    #: Whether Python leaves the working directory out of `sys.path`.
    safe_path: bool = True


def prepare(sandbox: Sandbox, user: str, *, cleanup_conftests: bool = True, safe_path: bool = True) -> Prepared:
    """Creates the agent's user, gives it the workspace, locks away what it must not see. Raises `DockerError`."""
    if not sandbox.isolates:  # this machine's own users and folders are left alone
        return Prepared("", sandbox.workdir, sandbox.workdir, SAFE_PATH, Scan(), {}, safe_path=safe_path)
    done = run(sandbox, ["sh", "-c", PREPARE, "sh", user, sandbox.workdir, IMPORTABLE], timeout=BUDGET)
    if done.exit_code != 0:
        raise DockerError(f"the sandbox cannot be prepared: {done.tail() or 'no answer in time'}", "sandbox_setup")
    passwd, *modules = done.stdout.decode(errors="replace").strip().splitlines()
    home = passwd.rsplit(":", 2)[-2]
    path, library_path = _unwritable(sandbox, user) if user != "root" else ("", None)
    importable = PYTEST_MODULES | frozenset(modules) if safe_path else PYTEST_MODULES
    before = scan(sandbox, cleanup_conftests, importable)
    reachable = (f"{sandbox.workdir}/", f"{home}/", "/tmp/", "/var/tmp/", "/output/", "/outputs/")  # noqa: S108 - in the sandbox
    originals = {
        name: data for name in before.names if name.startswith(reachable) and (data := sandbox.get(name, 64 << 20))
    }
    return Prepared(
        user, home, sandbox.workdir, path or SAFE_PATH, before, originals, library_path, importable, safe_path
    )


def _unwritable(sandbox: Sandbox, user: str) -> tuple[str, str | None]:
    """PATH and LD_LIBRARY_PATH without what the user can write to. A relative or empty entry is the workspace."""
    listed = run(sandbox, ["sh", "-c", UNWRITABLE], user=user, timeout=BUDGET)
    path, libraries, *_ = [*listed.stdout.decode(errors="replace").split("\n"), "", ""]
    return path.strip(":"), libraries.strip(":")


def clean(
    sandbox: Sandbox, prepared: Prepared, *, verifier_user: str = "root", cleanup_conftests: bool = True,
    verifier_dir: Path | None = None,
) -> list[str]:  # fmt: skip
    """Removes what the agent left that could run in place of the verifier's code, and returns its paths.

    Must be called when the agent's processes are gone: nothing here is safe against one that still runs.
    `verifier_dir` is the task's: its modules must not be hidden either.
    Raises `AgentError` when the agent left too much to search, `VerifierError` when a step exceeds `BUDGET` seconds.
    """
    if not sandbox.isolates:
        run(sandbox, ["sh", "-c", 'rm -rf -- "$@" && mkdir -p "$1"', "sh", "/logs/verifier", "/verifier", "/tests"])
        return []
    importable = prepared.importable
    if importable != PYTEST_MODULES and verifier_dir is not None:
        importable |= {path.name.split(".")[0] for path in verifier_dir.rglob("*")}
    found = scan(sandbox, cleanup_conftests, importable)
    doomed = set(found.names - prepared.before.names) | set(found.shadows - prepared.before.shadows)
    doomed |= {name for name, target in found.links.items() if prepared.before.links.get(name) != target}
    if doomed:
        _must(sandbox, ["rm", "-rf", "--"], sorted(doomed))
    forgotten = _forget_git_settings(sandbox, found.git, prepared.before.git)
    _must(sandbox, ["sh", "-c", RESET, "sh", prepared.workdir, verifier_user], ())
    for name, archive in prepared.originals.items():
        run(sandbox, ["sh", "-c", 'rm -rf -- "$1"; mkdir -p "${1%/*}"', "sh", name])
        sandbox.put(archive, str(PurePosixPath(name).parent))
    return [printable_path(name) for name in sorted(doomed | forgotten)]


def _forget_git_settings(
    sandbox: Sandbox, found: Set[tuple[str, str, str]], before: Set[tuple[str, str, str]]
) -> set[str]:
    """Takes away the settings that the agent made, each `(file, name, value)`; returns the files."""
    changed = {(file, name) for file, name, _ in found - before}
    if changed:
        pairs = [word for setting in sorted(changed) for word in setting]
        _must(sandbox, ["sh", "-c", RESET_GIT, "sh"], pairs)
        for file, name, value in sorted(before):
            if (file, name) in changed:
                run(sandbox, ["sh", "-c", KEEP_GIT, "sh", file, name, value])
    return {file for file, _ in changed}


def git_settings(output: str) -> frozenset[tuple[str, str, str]]:
    """What `GIT_SETTINGS` printed, as `(file, name, value)`."""
    found: set[tuple[str, str, str]] = set()
    for part in output.split("//\0")[:-1]:
        file, *settings = part.split("\0")[:-1]
        for setting in settings:
            name, _, value = setting.partition("\n")
            found.add((file, name, value))
    return frozenset(found)


def printable_path(name: str) -> str:
    """A path of the agent's as text: bytes that are not UTF-8 are escaped, `\\xff`."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def scan(sandbox: Sandbox, conftests: bool = True, importable: Set[str] = PYTEST_MODULES) -> Scan:
    """What in the sandbox could run in place of a verifier's code.

    Raises `AgentError` for more names than can be read, `VerifierError` when the search takes too long.
    """
    tests = [word for name in AUTORUN if conftests or name != "conftest.py" for word in ("-o", "-name", name)][1:]
    done = run(sandbox, ["sh", "-c", SCAN, "sh", sandbox.workdir, *tests], timeout=BUDGET, limit=64 << 20)
    if done.dropped:
        raise AgentError("the agent left too many files to be searched for what would trip the verifier", "disk_full")
    if done.exit_code is None:
        raise VerifierError(f"searching the sandbox for what would trip the verifier took more than {BUDGET:g} s")
    names, links, modules, packages, installed = _sections(done.stdout.decode(errors="surrogateescape"))
    common = {name.rpartition("/")[2] for name in installed}
    shadows = {name for path in modules if (name := _module_of(path)) and _stem(name) in importable}
    shadows |= {path for path in packages if path.rpartition("/")[2] in common}
    listed = run(sandbox, ["sh", "-c", GIT_SETTINGS, "sh", sandbox.workdir, RUN_BY_GIT], timeout=BUDGET, limit=8 << 20)
    if listed.dropped or listed.exit_code is None:
        raise AgentError("the agent left too many settings of git to be searched for programs", "agent_error")
    git = git_settings(listed.stdout.decode(errors="surrogateescape"))
    return Scan(frozenset(names), dict(zip(links[::2], links[1::2], strict=False)), frozenset(shadows), git)


def _sections(output: str) -> list[list[str]]:
    sections: list[list[str]] = [[]]
    for name in output.split("\0")[:-1]:
        if name == "//":
            sections.append([])
        else:
            sections[-1].append(name)
    return [*sections, [], [], [], []][:5]


def _module_of(path: str) -> str | None:
    """What makes a path importable: the file itself, or its folder for an `__init__` file; None where nothing does."""
    if not path.endswith(MODULE_SUFFIXES):
        return None
    folder, _, name = path.rpartition("/")
    return folder if name.startswith("__init__.") and folder.count("/") else path


def _stem(path: str) -> str:
    return path.rpartition("/")[2].split(".")[0]


def verifier_env(
    prepared: Prepared, own: dict[str, str], verifier_dir: str, plugins: Iterable[str] = ()
) -> dict[str, str]:
    """The verifier's environment: the task's own variables, overridden by ours."""
    addopts = f"-c /dev/null --confcutdir={verifier_dir} --rootdir={prepared.workdir} -p no:cacheprovider"
    inside_root = prepared.workdir == "/root" or prepared.workdir.startswith("/root/")
    return {
        **({} if prepared.library_path is None else {"LD_LIBRARY_PATH": prepared.library_path}),
        **own,
        "PATH": prepared.path,
        "HOME": "/nonexistent" if inside_root else "/root",
        "USER": "root",
        "LD_PRELOAD": "",
        "BASH_ENV": "",
        "ENV": "",
        "CDPATH": "",
        "PYTHONPATH": "",
        "PYTHONHOME": "",
        "PYTHONSTARTUP": "",
        "PYTHONSAFEPATH": "1" if prepared.safe_path else "",
        "PYTHONNOUSERSITE": "1",
        "PYTHONBREAKPOINT": "0",
        "PYTHONPYCACHEPREFIX": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": " ".join([addopts, *(f"-p {name}" for name in plugins)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PIP_CONFIG_FILE": "/dev/null",
        "UV_NO_CONFIG": "1",
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
        if done.exit_code is None:
            raise VerifierError("the sandbox cannot be cleaned for the verifier: no answer in time")
        if done.exit_code != 0:  # the same shell did as much before the agent
            reason = done.tail() or f"exit code {done.exit_code}"
            raise AgentError(f"the agent left a sandbox that cannot be cleaned for the verifier: {reason}")
        rest = rest[at_once:]
        if not rest:
            return
