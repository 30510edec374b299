"""`pi-acp` (alias `pi`): the coding agent Pi over the Agent Client Protocol.

The pair is pinned: pi-acp 0.0.34 hangs for ever at `session/new` with every pi before 1.0, because it asks for
`get_available_thinking_levels` and pi's "Unknown command" carries no request id.
"""

from __future__ import annotations

import json

from sandbox.agents.base import HOME, Scene
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Box

ADAPTER = "pi-acp@0.0.24"
PI = "@earendil-works/pi-coding-agent@0.74.2"
ROOT = f"{HOME}/pi"
HINT = f"the pair that works is {ADAPTER} with {PI} on Node.js 20 (bench agents bake pi --from IMAGE makes it)"


class Pi:
    name = "pi-acp"
    aliases: tuple[str, ...] = ("pi",)
    about = "Pi, over the Agent Client Protocol; speaks chat completions"
    needs_model = True
    version = f"pi-acp-{ADAPTER.rpartition('@')[2]}-{PI.rpartition('@')[2]}"

    def install(self, box: Box) -> None:
        install_packages(box, "pi", (ADAPTER, PI), ("pi-acp", "pi"))

    def act(self, scene: Scene) -> str:
        assert scene.model is not None
        scene.put_home(
            {
                ".pi/agent/models.json": json.dumps(models(scene)),
                ".pi/agent/settings.json": json.dumps({"compaction": {"enabled": False}}),
            }
        )
        env = {
            "PATH": path_of("pi", scene.prepared.path),
            "PI_OFFLINE": "1",
            "PI_ACP_PI_COMMAND": f"{ROOT}/node_modules/.bin/pi",
        }
        command = [f"{ROOT}/node_modules/.bin/pi-acp"]
        return scene.talk(command, env, name=self.name, hint=HINT, model_id=f"benchflow/{scene.model.name}")


def models(scene: Scene) -> dict[str, object]:
    """Pi's `models.json`: one provider, one model. Pi keeps 16,384 tokens in reserve and compacts where it has less."""
    assert scene.model is not None
    model = {"id": scene.model.name, "contextWindow": scene.window, "maxTokens": scene.longest_reply}
    provider = {
        "baseUrl": scene.model.base_url,
        "api": "openai-completions",
        "apiKey": scene.model.api_key,
        "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False},
        "models": [model],
    }
    return {"providers": {"benchflow": provider}}
