"""mini: a coding agent in one file. Reads a task on standard input, works on it with three tools, reports what it does.

Needs Python 3.8 and nothing else. Its model is BENCHFLOW_PROVIDER_MODEL at BENCHFLOW_PROVIDER_BASE_URL, chat
completions; MINI_SYSTEM, MINI_STEPS and MINI_MAX_TOKENS set its system prompt, calls and tokens per reply. Standard
output is one JSON event per line. Exit codes: 0 done, 3 the model gave no answer.
"""

# ruff: noqa: PTH103, PTH120, PTH123, S310, T201 - one file without the rest of this package, for Pythons we do not choose
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

STEPS = int(os.environ.get("MINI_STEPS", "30"))
COMMAND_SECONDS = 120
OUTPUT_CHARACTERS = 8000

SYSTEM = (
    os.environ.get("MINI_SYSTEM")
    or """You are a coding agent in a Linux sandbox. You act by calling tools.
Example: to write hello to /tmp/a.txt you answer
<tool_call>
{"name": "write", "arguments": {"path": "/tmp/a.txt", "content": "hello"}}
</tool_call>
When the task is done, say so in one sentence and call no tool."""
)


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("bash", "Run a shell command.", command="the command"),
    tool("read", "Read a text file.", path="absolute path"),
    tool("write", "Write a text file.", path="absolute path", content="the whole text"),
]


def main() -> None:
    task = sys.stdin.read()
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]
    for _ in range(STEPS):
        choice = ask(messages)
        message = choice["message"]
        if message.get("content"):
            emit("agent_message", text=message["content"])
        messages.append(message)  # unchanged: the next prompt must begin with exactly what was sampled
        calls = message.get("tool_calls") or []
        if not calls:
            end("max_tokens" if choice.get("finish_reason") == "length" else "end_turn")
            return
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call.get("id"), "content": act(call)})
            if arguments_of(call) is None:  # the model is told; engines refuse a prompt that contains it
                call["function"]["arguments"] = "{}"
    end("max_turn_requests")


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One choice of the model; two more attempts where the connection to it failed."""
    body: dict[str, Any] = {"model": os.environ["BENCHFLOW_PROVIDER_MODEL"], "messages": messages, "tools": TOOLS}
    if os.environ.get("MINI_MAX_TOKENS"):
        body["max_tokens"] = int(os.environ["MINI_MAX_TOKENS"])
    request = urllib.request.Request(
        os.environ["BENCHFLOW_PROVIDER_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {
            "Authorization": "Bearer " + os.environ["BENCHFLOW_PROVIDER_API_KEY"],
            "Content-Type": "application/json",
            "User-Agent": "mini/1",
        },
    )
    direct = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # the model is local, whatever http_proxy says
    problem = ""
    for tries_left in (2, 1, 0):
        try:
            with direct.open(request, timeout=900) as answer:
                choice: dict[str, Any] = json.load(answer)["choices"][0]
                return choice
        except urllib.error.HTTPError as error:
            problem = f"HTTP {error.code}: {error.read(400).decode(errors='replace')}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError, KeyError, IndexError) as error:
            problem = str(error)
        if tries_left:
            time.sleep(3 - tries_left)
    print(problem, file=sys.stderr)
    sys.exit(3)


def act(call: dict[str, Any]) -> str:
    """Runs one tool call and returns its result for the model."""
    name, text = call["function"].get("name", ""), call["function"].get("arguments")
    call_id, given = call.get("id") or "call", arguments_of(call)
    kind = {"bash": "execute", "read": "read", "write": "edit"}.get(name, "other")
    emit("tool_call", tool_call_id=call_id, kind=kind, title=name, status="in_progress", raw_input=given or text)
    try:
        result = run_tool(name, given)
        status = "completed"
    except (OSError, KeyError, TypeError, ValueError) as error:
        result, status = f"error: {type(error).__name__}: {error}", "failed"
    if len(result) > OUTPUT_CHARACTERS:
        half = OUTPUT_CHARACTERS // 2
        left_out = len(result) - 2 * half
        result = f"{result[:half]}\n[... {left_out} characters left out ...]\n{result[-half:]}"
    content = [{"type": "content", "content": {"type": "text", "text": result}}]
    emit("tool_call", tool_call_id=call_id, status=status, content=content, raw_output=result)
    return result


def arguments_of(call: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a tool call, None when they are no JSON object."""
    try:
        given = json.loads(call["function"].get("arguments") or "{}")
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def run_tool(name: str, given: dict[str, Any] | None) -> str:
    if given is None:
        raise ValueError("the arguments must be a JSON object")
    if name == "bash":
        return run_command(given["command"])
    if name == "read":
        with open(given["path"], encoding="utf-8", errors="replace") as file:
            return file.read(4 * OUTPUT_CHARACTERS)
    if name == "write":
        folder = os.path.dirname(given["path"])
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(given["path"], "w", encoding="utf-8") as file:
            file.write(given["content"])
        return "written"
    raise ValueError(f"there is no tool {name!r}; there are bash, read and write")


def run_command(command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("BENCHFLOW_")}
    # A file, not a pipe: a server left in the background would keep a pipe open forever.
    with tempfile.TemporaryFile() as output:
        shell = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code = shell.wait(timeout=COMMAND_SECONDS)
            note = f"\n(exit code {code})" if code else ""
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            note = f"\n(still running after {COMMAND_SECONDS} seconds, ended)"
        output.seek(0)
        return output.read(64 * OUTPUT_CHARACTERS).decode(errors="replace") + note


def emit(event: str, **fields: Any) -> None:
    print(json.dumps({"type": event, **fields}), flush=True)


def end(reason: str) -> None:
    emit("end", stop_reason=reason)


if __name__ == "__main__":
    main()
