"""Tar archives: the form in which files enter and leave a sandbox."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox.errors import AgentError


def folder_archive(folder: Path) -> bytes:
    """A tar of a folder's regular files and folders, owned by root. `.sh` files are executable."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_dir():
                _add(tar, name, None, 0o755)
            elif path.is_file() and not path.is_symlink():
                executable = path.suffix == ".sh" or path.stat().st_mode & 0o111
                _add(tar, name, path.read_bytes(), 0o755 if executable else 0o644)
    return buffer.getvalue()


def file_archive(name: str, data: bytes, *, mode: int = 0o644) -> bytes:
    """A tar of one file, owned by root."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        _add(tar, name, data, mode)
    return buffer.getvalue()


def regular_files(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Path below the archive's top folder and content of each regular file.

    Links, devices and paths that leave the folder are skipped. Raises `AgentError` for an archive that cannot be read:
    the sandbox's files are the agent's.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                _, _, name = member.name.partition("/")
                if member.isreg() and name and _stays_inside(name) and (file := tar.extractfile(member)):
                    yield name, file.read()
    except (tarfile.TarError, RecursionError, ValueError, OSError) as error:
        raise AgentError(f"the sandbox's files cannot be read ({error})", "agent_error") from error


def extract(archive: bytes, to: Path, content: Callable[[bytes], bytes] = lambda data: data) -> None:
    """Writes an archive's folders and regular files below `to`, each file's bytes as `content` returns them.

    `TarFile.extractall(filter="data")` does the same from Python 3.11.4 on; Debian 12 has 3.11.2.
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            path = to / member.name
            if not _stays_inside(member.name):
                continue
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
            elif member.isreg() and (file := tar.extractfile(member)):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content(file.read()))
                path.chmod(member.mode & 0o755)


def _stays_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


def _add(tar: tarfile.TarFile, name: str, data: bytes | None, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = mode, int(time.time())
    if data is None:
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    else:
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
