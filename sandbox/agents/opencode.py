"""`opencode`: the coding agent OpenCode over the Agent Client Protocol; chat completions."""

from __future__ import annotations

import json
from typing import Any

from sandbox.agents.base import HOME, Scene
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Box

PACKAGE = "opencode-ai@1.18.33"
PROGRAM = f"{HOME}/opencode/node_modules/.bin/opencode"
HINT = f"what works is {PACKAGE} (bench agents bake opencode --from IMAGE makes it)"


class OpenCode:
    name = "opencode"
    aliases: tuple[str, ...] = ()
    about = "OpenCode, over the Agent Client Protocol; speaks chat completions"
    needs_model = True
    version = f"opencode-{PACKAGE.rpartition('@')[2]}"

    def install(self, box: Box) -> None:
        install_packages(box, self.name, (PACKAGE,), ("opencode",))

    def act(self, scene: Scene) -> str:
        assert scene.model is not None
        scene.put_home({".config/opencode/opencode.json": json.dumps(config(scene))})
        env = {
            "PATH": path_of(self.name, scene.prepared.path),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_AUTOCOMPACT": "1",
            "OPENCODE_DISABLE_PRUNE": "1",
        }
        model = f"benchflow/{scene.model.name}"
        return scene.talk([PROGRAM, "acp"], env, name=self.name, hint=HINT, model_id=model)


def config(scene: Scene) -> dict[str, Any]:
    """`opencode.json`: one provider, one model, everything allowed, nothing compacted or left out of the history."""
    assert scene.model is not None
    limit = {"context": scene.window, "output": scene.longest_reply}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "benchflow",
        "options": {"baseURL": scene.model.base_url, "apiKey": scene.model.api_key},
        "models": {scene.model.name: {"name": scene.model.name, "limit": limit, "tool_call": True}},
    }
    model = f"benchflow/{scene.model.name}"
    return {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"benchflow": provider},
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "compaction": {"auto": False, "prune": False},
    }
