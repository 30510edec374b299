"""`pi-acp` (alias `pi`): the coding agent Pi over the Agent Client Protocol.

The pair is pinned: pi-acp 0.0.34 hangs forever at `session/new` with every pi before 1.0, because it asks for
`get_available_thinking_levels` and pi's "Unknown command" carries no request id.
"""

from __future__ import annotations

import json

from sandbox.agents.acp import talk
from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import INSTALL_ROOT, Agent
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Sandbox

ADAPTER = "pi-acp@0.0.24"
PI = "@earendil-works/pi-coding-agent@0.74.2"
ROOT = f"{INSTALL_ROOT}/pi"
HINT = f"the pair that works is {ADAPTER} with {PI} on Node.js 20 (bench agents build pi --from IMAGE makes it)"


class Pi(Agent):
    name = "pi-acp"
    aliases = ("pi",)
    about = "Pi, over the Agent Client Protocol; speaks chat completions"
    version = f"pi-acp-{ADAPTER.rpartition('@')[2]}-{PI.rpartition('@')[2]}"

    def install(self, sandbox: Sandbox) -> None:
        install_packages(sandbox, "pi", (ADAPTER, PI), ("pi-acp", "pi"))

    def act(self, agent_run: AgentRun) -> str:
        assert agent_run.model is not None
        agent_run.put_home(
            {
                ".pi/agent/models.json": json.dumps(models(agent_run)),
                ".pi/agent/settings.json": json.dumps({"compaction": {"enabled": False}}),
            }
        )
        env = {
            "PATH": path_of("pi", agent_run.prepared.path),
            "PI_OFFLINE": "1",
            "PI_ACP_PI_COMMAND": f"{ROOT}/node_modules/.bin/pi",
        }
        command = [f"{ROOT}/node_modules/.bin/pi-acp"]
        return talk(agent_run, command, env, name=self.name, hint=HINT, model_id=f"benchflow/{agent_run.model.name}")


def models(agent_run: AgentRun) -> dict[str, object]:
    """Pi's `models.json`: one provider, one model. Pi keeps 16,384 tokens in reserve and compacts where it has less."""
    assert agent_run.model is not None
    limits = {"contextWindow": agent_run.context_window, "maxTokens": agent_run.max_reply_tokens}
    provider = {
        "baseUrl": agent_run.model.base_url,
        "api": "openai-completions",
        "apiKey": agent_run.model.api_key,
        "compat": {"supportsDeveloperRole": False, "supportsReasoningEffort": False},
        "models": [{"id": agent_run.model.name, **limits}],
    }
    return {"providers": {"benchflow": provider}}
