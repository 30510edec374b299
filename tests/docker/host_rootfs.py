"""Pack a small Debian root filesystem from the packages of this Debian machine: host_rootfs.py OUT.tar [PACKAGE…].

Takes the essential and required packages, those named, and what they depend on. Needs no network.
"""

import glob
import io
import os
import re
import sys
import tarfile
from pathlib import Path

out, extra = sys.argv[1], sys.argv[2:]

installed: dict[str, str] = {}
provided: dict[str, str] = {}
for entry in Path("/var/lib/dpkg/status").read_text().split("\n\n"):
    name = re.search(r"^Package: (\S+)", entry, re.M)
    if not name or not re.search(r"^Status: .* installed$", entry, re.M):
        continue
    installed.setdefault(name[1], entry)
    for names in re.findall(r"^Provides: (.*)", entry, re.M):
        for virtual in names.split(","):
            provided.setdefault(virtual.split()[0].split(":")[0], name[1])

wanted = [n for n, e in installed.items() if re.search(r"^(Essential: yes|Priority: required)", e, re.M)]
wanted += ["ca-certificates", "procps", *extra]
chosen: set[str] = set()
while wanted:
    name = wanted.pop()
    name = name if name in installed else provided.get(name)
    if not name or name in chosen:
        continue
    chosen.add(name)
    for line in re.findall(r"^(?:Pre-)?Depends: (.*)", installed[name], re.M):
        for alternatives in line.split(","):
            names = [a.split()[0].split(":")[0] for a in alternatives.split("|")]
            wanted += next(([n] for n in names if n in installed or n in provided), [])

skip = re.compile(r"^/usr/share/(doc|man|info|locale|lintian|bug)/")
listed: set[str] = set()
for name in chosen:
    for path in glob.glob(f"/var/lib/dpkg/info/{name}.list") + glob.glob(f"/var/lib/dpkg/info/{name}:*.list"):
        listed.update(p for p in Path(path).read_text().split("\n") if p and p != "/." and not skip.match(p))
listed.update(link for link in ("/bin", "/sbin", "/lib", "/lib64") if os.path.islink(link))

paths = {os.path.join(os.path.realpath(os.path.dirname(p)), os.path.basename(p)) for p in listed}
for folder in ("/etc/alternatives", "/usr/bin", "/usr/sbin"):
    for name in os.listdir(folder):
        link = f"{folder}/{name}"
        if os.path.islink(link) and os.path.realpath(link) in paths:
            paths.add(link)
paths.update(os.path.join("/etc/ssl/certs", f) for f in os.listdir("/etc/ssl/certs"))
paths = {p for p in paths if os.path.lexists(p)}

packed: set[str] = set()
with tarfile.open(out, "w") as tar:

    def pack(path: str) -> None:
        if path in ("", "/") or path in packed:
            return
        pack(os.path.dirname(path))
        packed.add(path)
        tar.add(path, arcname=path[1:], recursive=False)

    def write(name: str, text: str, mode: int = 0o644) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(text.encode()), mode
        tar.addfile(info, io.BytesIO(text.encode()))

    for path in sorted(paths):
        pack(path)
    for name in ("passwd", "group"):
        write(f"etc/{name}", Path(f"/usr/share/base-passwd/{name}.master").read_text())
    users = [line.split(":")[0] for line in Path("/usr/share/base-passwd/passwd.master").read_text().splitlines()]
    write("etc/shadow", "".join(f"{user}:*:19000:0:99999:7:::\n" for user in users), 0o640)
    write("etc/resolv.conf", "")
    for name, mode in {
        "tmp": 0o1777,
        "var/tmp": 0o1777,
        "root": 0o700,
        "proc": 0o755,
        "sys": 0o755,
        "dev": 0o755,
        "run": 0o755,
        "home": 0o755,
    }.items():
        if "/" + name not in packed:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)
print(f"{len(chosen)} packages, {len(packed)} paths, {os.path.getsize(out) >> 20} MiB")
