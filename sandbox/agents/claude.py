"""`claude-agent-acp` (alias `claude`): Claude Code over the Agent Client Protocol; Anthropic Messages."""

from __future__ import annotations

import json

from sandbox.agents.acp import talk
from sandbox.agents.agent_run import AgentRun
from sandbox.agents.base import INSTALL_ROOT, Agent
from sandbox.agents.install_npm import install_packages, path_of
from sandbox.containers.base import Sandbox

PACKAGE = "@agentclientprotocol/claude-agent-acp@0.101.0"
PROGRAM = f"{INSTALL_ROOT}/claude/node_modules/.bin/claude-agent-acp"
HINT = f"what works is {PACKAGE} on Node.js 22 (bench agents build claude --from IMAGE makes it)"
#: What a coding task needs of its two dozen tools; --agent-env CLAUDE_TOOLS=Bash,Edit,Task names others.
TOOLS = "Bash,Edit,Glob,Grep,Read,Write"


class Claude(Agent):
    name = "claude-agent-acp"
    aliases = ("claude",)
    about = "Claude Code, over the Agent Client Protocol; speaks Anthropic's Messages"
    version = f"claude-agent-acp-{PACKAGE.rpartition('@')[2]}"

    def install(self, sandbox: Sandbox) -> None:
        install_packages(sandbox, "claude", (PACKAGE,), ("claude-agent-acp",), node=22)

    def act(self, agent_run: AgentRun) -> str:
        assert agent_run.model is not None
        agent_run.put_home({".claude/settings.json": json.dumps({"permissions": {"defaultMode": "bypassPermissions"}})})
        model = agent_run.model
        names = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                 "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL",
                 "CLAUDE_CODE_SUBAGENT_MODEL")  # fmt: skip
        env = {
            "PATH": path_of("claude", agent_run.prepared.path),
            "ANTHROPIC_BASE_URL": model.base_url.removesuffix("/v1"),
            "ANTHROPIC_AUTH_TOKEN": model.api_key,
            **dict.fromkeys(names, model.name),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(agent_run.max_reply_tokens),
            **dict.fromkeys(OFF, "1"),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_ENABLE_PROMPT_SUGGESTION": "false",
            "MAX_THINKING_TOKENS": "0",
        }
        options = {"tools": agent_run.env.get("CLAUDE_TOOLS", TOOLS).split(","), "promptSuggestions": False}
        return talk(agent_run, [PROGRAM], env, name=self.name, hint=HINT, meta={"claudeCode": {"options": options}})


#: Side calls, compaction, updates, telemetry, and beta fields that no engine knows.
OFF = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS",
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE", "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS", "CLAUDE_CODE_DISABLE_AUTO_MEMORY",
    "DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER", "DISABLE_AUTO_COMPACT",
    "DISABLE_COMPACT", "DISABLE_MICROCOMPACT", "IS_SANDBOX",
)  # fmt: skip
