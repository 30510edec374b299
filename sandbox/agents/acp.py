"""A prompt over the Agent Client Protocol: JSON-RPC 2.0, one object a line, on the standard streams of a running agent.

The connection is the package `agent-client-protocol`'s; the line transport is ours, because an agent may write a line
of 20 MB, or a megabyte of chatter that is no protocol at all. The package's models take most of a second to load, so it
is imported where an agent speaks, not by every command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.containers.base import STDOUT, Bounded, Lines, Pipe, Ran
from sandbox.errors import AgentError

if TYPE_CHECKING:
    from acp.connection import Connection
    from acp.exceptions import RequestError

    from sandbox.agents.base import AgentRun

HANDSHAKE = 60.0
#: Longest line that is read as a message.
LONGEST = 64 << 20
#: Messages that wait to be read before the agent is made to wait.
QUEUED = 256


def converse(
    agent_run: AgentRun, pipe: Pipe, *, name: str, hint: str = "", model_id: str | None = None,
    meta: dict[str, Any] | None = None, handshake: float | None = None,
) -> str:  # fmt: skip
    """Gives the scene's prompt to the agent behind `pipe` and returns its stop reason.

    Raises `AgentError`: `acp_error` for what is no ACP or takes more than `handshake` (60) seconds, `pipe_closed`
    for an agent that ended, `timeout` when the prompt outran its budget. `hint` says what to try where it never began;
    `model_id` is set where the agent begins with another; `meta` goes with `session/new`: what only this agent knows.
    """
    return asyncio.run(_Talk(agent_run, pipe, name, hint, handshake or HANDSHAKE).run(model_id, meta))


class _Talk:
    def __init__(self, agent_run: AgentRun, pipe: Pipe, name: str, hint: str, handshake: float) -> None:
        self.agent_run, self.name, self.hint, self.handshake = agent_run, name, hint, handshake
        self.failed: AgentError | None = None
        self.transport = LineTransport(pipe, agent_run.logs / f"{name}.txt")
        self.pipe = pipe

    async def run(self, model_id: str | None, meta: dict[str, Any] | None) -> str:
        from acp.connection import Connection
        from acp.exceptions import RequestError

        self.transport.start()
        self.agent_run.trajectory.source = "acp"
        connection = Connection(self.handle, self.transport)
        try:
            session = await self.begin(connection, model_id, meta)
            self.agent_run.trajectory.text("user_message", self.agent_run.prompt)
            self.agent_run.begin()
            return await self.prompt(connection, session)
        except AgentError:
            raise
        except RequestError as error:
            raise AgentError(f"{self.name} answered with an error: {_words(error)}", "acp_error") from error
        except (ConnectionError, OSError) as error:
            raise self.gone() from error
        finally:
            with contextlib.suppress(Exception):
                await connection.close()

    async def begin(self, connection: Connection, model_id: str | None, meta: dict[str, Any] | None) -> str:
        from acp.meta import PROTOCOL_VERSION

        about = await self.ask(
            connection,
            "initialize",
            {
                "protocolVersion": PROTOCOL_VERSION,
                "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
                "clientInfo": {"name": "benchflow-sidecar", "version": "1"},
            },
        )
        self.agent_run.said_name = str((about.get("agentInfo") or {}).get("name") or self.name)
        cwd = self.agent_run.prepared.workdir
        params = {"cwd": cwd, "mcpServers": [], **({"_meta": meta} if meta else {})}
        new = await self.ask(connection, "session/new", params)
        session = new.get("sessionId")
        if not isinstance(session, str):
            raise AgentError(f"{self.name} gave no session id", "acp_error")
        current = (new.get("models") or {}).get("currentModelId")
        if model_id is not None and current not in (None, model_id):
            await self.ask(connection, "session/set_model", {"sessionId": session, "modelId": model_id})
        return session

    async def ask(self, connection: Connection, method: str, params: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await asyncio.wait_for(connection.send_request(method, params), self.handshake)
        except TimeoutError as error:
            words = f"{self.name} did not answer {method} within {self.handshake:g} s"
            raise AgentError(f"{words}; {self.hint}" if self.hint else words, "acp_error") from error
        return answer if isinstance(answer, dict) else {}

    async def prompt(self, connection: Connection, session: str) -> str:
        text = {"type": "text", "text": self.agent_run.prompt}
        asked = connection.send_request("session/prompt", {"sessionId": session, "prompt": [text]})
        try:
            answer = await asyncio.wait_for(asked, self.agent_run.left())
        except TimeoutError as error:
            with contextlib.suppress(Exception):  # a hung agent may hang here too
                await asyncio.wait_for(connection.send_notification("session/cancel", {"sessionId": session}), 2)
            raise self.agent_run.out_of_time() from error
        reason = answer.get("stopReason") if isinstance(answer, dict) else None
        return str(reason or "end_turn")

    async def handle(self, method: str, params: Any, is_notification: bool) -> Any:
        """What the agent asks of us: it tells what it does, and asks for permission, which it has."""
        from acp.exceptions import RequestError

        params = params if isinstance(params, dict) else {}
        if method == "session/update":
            try:
                self.update(params.get("update") or {})
            except AgentError as error:
                self.failed = error
                self.transport.end()
            return None
        if method == "session/request_permission":
            return permission(params.get("options") or [])
        if is_notification:  # an extension of the agent's own, such as codex-acp's `_auth/status_update`
            return None
        raise RequestError.method_not_found(method)

    def update(self, update: dict[str, Any]) -> None:
        kind = update.get("sessionUpdate")
        if kind in ("agent_message_chunk", "agent_thought_chunk"):
            text = (update.get("content") or {}).get("text")
            if isinstance(text, str) and text.strip("\n"):
                self.agent_run.trajectory.text(kind.removesuffix("_chunk"), text)
        elif kind in ("tool_call", "tool_call_update"):
            self.agent_run.trajectory.tool(
                str(update.get("toolCallId")),
                kind=update.get("kind"),
                title=update.get("title"),
                status=update.get("status"),
                content=update.get("content"),
                raw_input=update.get("rawInput"),
                raw_output=update.get("rawOutput"),
            )

    def gone(self) -> AgentError:
        """Why an agent that left in the middle did so."""
        if self.failed is not None:
            return self.failed
        if self.transport.too_long:
            limit = LONGEST >> 20
            return AgentError(f"{self.name} wrote a line of more than {limit} MB, which is no message", "acp_error")
        code = self.pipe.exit_code()
        error = self.agent_run.died(self.name, Ran(code, b"", self.transport.stderr.value()))
        category = "pipe_closed" if error.category == "agent_error" else error.category
        return AgentError(f"{error} (it ended before its turn did)", category)


def permission(options: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that lets the agent go on; its sandbox is the limit, not its manners."""
    wanted = ("bypassPermissions", "allow_always", "allow_once")
    ranked = [o for want in wanted for o in options if want in (o.get("optionId"), o.get("kind"))]
    chosen = next(iter(ranked or options), None)
    if chosen is None:
        return {"outcome": {"outcome": "cancelled"}}
    return {"outcome": {"outcome": "selected", "optionId": chosen.get("optionId")}}


class LineTransport:
    """Messages over a pipe, which blocks: a thread reads it. What is no message goes to `log`."""

    def __init__(self, pipe: Pipe, log: Path) -> None:
        self.stderr = Bounded(64 << 10)
        self.too_long = False
        self._pipe = pipe
        self._log = log
        self._chatter = Bounded(1 << 20)
        self._room = threading.Semaphore(QUEUED)
        self._ended = threading.Event()
        self._lines = Lines(self._line, LONGEST)
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop() if _running() else None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="acp-reader", daemon=True).start()

    async def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        await asyncio.get_running_loop().run_in_executor(None, self._pipe.write, data)

    async def receive(self) -> dict[str, Any] | None:
        message = await self._queue.get()
        self._room.release()
        return message

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """No more messages; the reader stops, and what was chatter is written down."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._queue.put_nowait(None)
        self._pipe.close_stdin()
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.write_bytes(self._chatter.value() + self.stderr.value())

    def _read(self) -> None:
        lines = self._lines
        while not self._ended.is_set():
            try:
                piece = self._pipe.read(1.0)
            except TimeoutError:
                continue
            except (OSError, ValueError):
                break
            if piece is None:
                lines.flush()
                break
            stream, data = piece
            if stream == STDOUT:
                lines.feed(data)
            else:
                self.stderr.add(data)
            if lines.too_long:
                self.too_long = True
                break
        self._post(None)

    def _line(self, line: bytes) -> None:
        if self._lines.too_long:  # what follows may be the end of a turn that lost a message
            return
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict) and ("method" in message or "id" in message):
            while not self._room.acquire(timeout=1.0):
                if self._ended.is_set():
                    return
            self._post(message)
        elif line.strip():
            self._chatter.add(line + b"\n")

    def _post(self, message: dict[str, Any] | None) -> None:
        assert self._loop is not None
        put: Callable[[dict[str, Any] | None], None] = self._queue.put_nowait
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(put, message)


def _running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _words(error: RequestError) -> str:
    data = getattr(error, "data", None)
    details = data.get("details") if isinstance(data, dict) else None
    return f"{error}: {details}" if details else str(error)
