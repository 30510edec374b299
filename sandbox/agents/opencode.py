"""`opencode`: the coding agent OpenCode over the Agent Client Protocol; chat completions."""

from __future__ import annotations

import json
from typing import Any

from sandbox.agents.acp import talk
from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import INSTALL_ROOT, Agent
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Sandbox

PACKAGE = "opencode-ai@1.18.33"
PROGRAM = f"{INSTALL_ROOT}/opencode/node_modules/.bin/opencode"
HINT = f"what works is {PACKAGE} (bench agents build opencode --from IMAGE makes it)"


class OpenCode(Agent):
    name = "opencode"
    about = "OpenCode, over the Agent Client Protocol; speaks chat completions"
    version = f"opencode-{PACKAGE.rpartition('@')[2]}"

    def install(self, sandbox: Sandbox) -> None:
        install_packages(sandbox, self.name, (PACKAGE,), ("opencode",))

    def act(self, agent_run: AgentRun) -> str:
        assert agent_run.model is not None
        agent_run.put_home({".config/opencode/opencode.json": json.dumps(config(agent_run))})
        env = {
            "PATH": path_of(self.name, agent_run.prepared.path),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_AUTOCOMPACT": "1",
            "OPENCODE_DISABLE_PRUNE": "1",
        }
        model = f"benchflow/{agent_run.model.name}"
        return talk(agent_run, [PROGRAM, "acp"], env, name=self.name, hint=HINT, model_id=model)


def config(agent_run: AgentRun) -> dict[str, Any]:
    """`opencode.json`: one provider, one model, everything allowed, nothing compacted or left out of the history."""
    assert agent_run.model is not None
    limit = {"context": agent_run.context_window, "output": agent_run.max_reply_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "benchflow",
        "options": {"baseURL": agent_run.model.base_url, "apiKey": agent_run.model.api_key},
        "models": {agent_run.model.name: {"name": agent_run.model.name, "limit": limit, "tool_call": True}},
    }
    model = f"benchflow/{agent_run.model.name}"
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
