"""`codex-acp` (alias `codex`): OpenAI's Codex over the Agent Client Protocol; Responses."""

from __future__ import annotations

from sandbox.agents.base import HOME, Scene
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Box

ADAPTER = "@agentclientprotocol/codex-acp@2.6.0"
CODEX = "@openai/codex@0.166.0"
PROGRAM = f"{HOME}/codex/node_modules/.bin/codex-acp"
HINT = f"the pair that works is {ADAPTER} with {CODEX} (bench agents bake codex --from IMAGE makes it)"


class Codex:
    name = "codex-acp"
    aliases: tuple[str, ...] = ("codex",)
    about = "OpenAI's Codex, over the Agent Client Protocol; speaks Responses"
    needs_model = True
    version = f"codex-acp-{ADAPTER.rpartition('@')[2]}-{CODEX.rpartition('@')[2]}"

    def install(self, box: Box) -> None:
        install_packages(box, "codex", (ADAPTER, CODEX), ("codex-acp", "codex"), node=20)

    def act(self, scene: Scene) -> str:
        assert scene.model is not None
        scene.put_home({".codex/config.toml": config(scene)})
        env = {
            "PATH": path_of("codex", scene.prepared.path),
            "CODEX_HOME": f"{scene.prepared.home}/.codex",
            "CODEX_KEY": scene.model.api_key,
            "MODEL_PROVIDER": "benchflow",
            "INITIAL_AGENT_MODE": "agent-full-access",
            "NO_BROWSER": "1",
        }
        return scene.talk([PROGRAM], env, name=self.name, hint=HINT)


def config(scene: Scene) -> str:
    """`config.toml`: one provider that speaks Responses, no sandbox within the sandbox, nothing compacted."""
    assert scene.model is not None
    return f"""\
model = {quoted(scene.model.name)}
model_provider = "benchflow"
model_context_window = {scene.window}
model_auto_compact_token_limit = {10 * scene.window}
model_reasoning_summary = "none"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.benchflow]
name = "benchflow"
base_url = {quoted(scene.model.base_url)}
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
