"""`codex-acp` (alias `codex`): OpenAI's Codex over the Agent Client Protocol; Responses."""

from __future__ import annotations

from sandbox.agents.acp import talk
from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import INSTALL_ROOT, Agent
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Sandbox

ADAPTER = "@agentclientprotocol/codex-acp@2.6.0"
CODEX = "@openai/codex@0.166.0"
PROGRAM = f"{INSTALL_ROOT}/codex/node_modules/.bin/codex-acp"
HINT = f"the pair that works is {ADAPTER} with {CODEX} (bench agents build codex --from IMAGE makes it)"


class Codex(Agent):
    name = "codex-acp"
    aliases = ("codex",)
    about = "OpenAI's Codex, over the Agent Client Protocol; speaks Responses"
    version = f"codex-acp-{ADAPTER.rpartition('@')[2]}-{CODEX.rpartition('@')[2]}"

    def install(self, sandbox: Sandbox) -> None:
        install_packages(sandbox, "codex", (ADAPTER, CODEX), ("codex-acp", "codex"), node=20)

    def act(self, agent_run: AgentRun) -> str:
        assert agent_run.model is not None
        agent_run.put_home({".codex/config.toml": config(agent_run)})
        env = {
            "PATH": path_of("codex", agent_run.prepared.path),
            "CODEX_HOME": f"{agent_run.prepared.home}/.codex",
            "CODEX_KEY": agent_run.model.api_key,
            "MODEL_PROVIDER": "benchflow",
            "INITIAL_AGENT_MODE": "agent-full-access",
            "NO_BROWSER": "1",
        }
        return talk(agent_run, [PROGRAM], env, name=self.name, hint=HINT)


def config(agent_run: AgentRun) -> str:
    """`config.toml`: one provider that speaks Responses, no sandbox within the sandbox, nothing compacted."""
    assert agent_run.model is not None
    return f"""\
model = {quoted(agent_run.model.name)}
model_provider = "benchflow"
model_context_window = {agent_run.context_window}
model_auto_compact_token_limit = {10 * agent_run.context_window}
model_reasoning_summary = "none"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.benchflow]
name = "benchflow"
base_url = {quoted(agent_run.model.base_url)}
env_key = "CODEX_KEY"
wire_api = "responses"
request_max_retries = 2
stream_max_retries = 2

[analytics]
enabled = false

[otel]
exporter = "none"

[history]
persistence = "none"
"""


def quoted(text: str) -> str:
    """A TOML string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
