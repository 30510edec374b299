"""`qwen-code`: the coding agent Qwen Code over the Agent Client Protocol; chat completions."""

from __future__ import annotations

import json
from typing import Any

from sandbox.agents.base import HOME, Scene
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Box

PACKAGE = "@qwen-code/qwen-code@0.24.4"
PROGRAM = f"{HOME}/qwen-code/node_modules/.bin/qwen"
HINT = f"what works is {PACKAGE} on Node.js 22 (bench agents bake qwen-code --from IMAGE makes it)"


class QwenCode:
    name = "qwen-code"
    aliases: tuple[str, ...] = ("qwen",)
    about = "Qwen Code, over the Agent Client Protocol; speaks chat completions"
    needs_model = True
    version = f"qwen-code-{PACKAGE.rpartition('@')[2]}"

    def install(self, box: Box) -> None:
        install_packages(box, self.name, (PACKAGE,), ("qwen",), node=22)

    def act(self, scene: Scene) -> str:
        assert scene.model is not None
        scene.put_home({".qwen/settings.json": json.dumps(settings(scene))})
        env = {
            "PATH": path_of(self.name, scene.prepared.path),
            "OPENAI_BASE_URL": scene.model.base_url,
            "OPENAI_API_KEY": scene.model.api_key,
            "OPENAI_MODEL": scene.model.name,
            "QWEN_DISABLE_AUTO_TITLE": "1",
        }
        command = [PROGRAM, "--acp", "--auth-type", "openai", "--approval-mode", "yolo"]
        return scene.talk(command, env, name=self.name, hint=HINT)


def settings(scene: Scene) -> dict[str, Any]:
    """`settings.json`: the model, no side calls (memories, titles, follow-ups), and a history that keeps everything."""
    assert scene.model is not None
    return {
        "security": {"auth": {"selectedType": "openai"}},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "ui": {"enableFollowupSuggestions": False},
        "experimental": {"emitToolUseSummaries": False},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
        "context": {
            "autoCompactThreshold": 1,
            "clearContextOnIdle": {"toolResultsThresholdMinutes": -1, "toolResultsTotalCharsThreshold": -1},
        },
        "model": {
            "name": scene.model.name,
            "generationConfig": {
                "contextWindowSize": scene.window,
                "samplingParams": {"max_tokens": scene.longest_reply},
                "maxRetries": 2,
            },
        },
    }
