"""`qwen-code`: the coding agent Qwen Code over the Agent Client Protocol; chat completions."""

from __future__ import annotations

import json
from typing import Any

from sandbox.agents.acp import talk
from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import INSTALL_ROOT, Agent
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Sandbox

PACKAGE = "@qwen-code/qwen-code@0.24.4"
PROGRAM = f"{INSTALL_ROOT}/qwen-code/node_modules/.bin/qwen"
HINT = f"what works is {PACKAGE} on Node.js 22 (bench agents build qwen-code --from IMAGE makes it)"


class QwenCode(Agent):
    name = "qwen-code"
    aliases = ("qwen",)
    about = "Qwen Code, over the Agent Client Protocol; speaks chat completions"
    version = f"qwen-code-{PACKAGE.rpartition('@')[2]}"

    def install(self, sandbox: Sandbox) -> None:
        install_packages(sandbox, self.name, (PACKAGE,), ("qwen",), node=22)

    def act(self, agent_run: AgentRun) -> str:
        assert agent_run.model is not None
        agent_run.put_home({".qwen/settings.json": json.dumps(settings(agent_run))})
        env = {
            "PATH": path_of(self.name, agent_run.prepared.path),
            "OPENAI_BASE_URL": agent_run.model.base_url,
            "OPENAI_API_KEY": agent_run.model.api_key,
            "OPENAI_MODEL": agent_run.model.name,
            "QWEN_DISABLE_AUTO_TITLE": "1",
        }
        command = [PROGRAM, "--acp", "--auth-type", "openai", "--approval-mode", "yolo"]
        return talk(agent_run, command, env, name=self.name, hint=HINT)


def settings(agent_run: AgentRun) -> dict[str, Any]:
    """`settings.json`: the model, no side calls (memories, titles, follow-ups), and a history that keeps everything."""
    assert agent_run.model is not None
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
            "name": agent_run.model.name,
            "generationConfig": {
                "contextWindowSize": agent_run.context_window,
                "samplingParams": {"max_tokens": agent_run.max_reply_tokens},
                "maxRetries": 2,
            },
        },
    }
