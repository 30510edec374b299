"""`gemini`: Google's Gemini CLI over the Agent Client Protocol; Gemini's own generateContent."""

from __future__ import annotations

import json
from typing import Any

from sandbox.agents.acp import talk
from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import INSTALL_ROOT, Agent
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Sandbox

PACKAGE = "@google/gemini-cli@0.61.0"
PROGRAM = f"{INSTALL_ROOT}/gemini/node_modules/.bin/gemini"
HINT = f"what works is {PACKAGE} (bench agents build gemini --from IMAGE makes it)"
#: It assumes a million tokens of context for a model that it does not know; no setting changes that.
SETTINGS: dict[str, Any] = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
    "model": {"compressionThreshold": 1, "skipNextSpeakerCheck": True, "disableLoopDetection": True},
}


class Gemini(Agent):
    name = "gemini"
    aliases = ("gemini-cli",)
    about = "Google's Gemini CLI, over the Agent Client Protocol; speaks Gemini's generateContent"
    version = f"gemini-cli-{PACKAGE.rpartition('@')[2]}"

    def install(self, sandbox: Sandbox) -> None:
        install_packages(sandbox, self.name, (PACKAGE,), ("gemini",))

    def act(self, agent_run: AgentRun) -> str:
        assert agent_run.model is not None
        agent_run.put_home({".gemini/settings.json": json.dumps(SETTINGS)})
        env = {
            "PATH": path_of(self.name, agent_run.prepared.path),
            "GEMINI_API_KEY": agent_run.model.api_key,
            "GOOGLE_GEMINI_BASE_URL": agent_run.model.base_url.removesuffix("/v1"),
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "NO_BROWSER": "true",
        }
        command = [PROGRAM, "--acp", "--skip-trust", "--approval-mode", "yolo", "-m", agent_run.model.name]
        return talk(agent_run, command, env, name=self.name, hint=HINT)
