"""Talks to an agent over the Agent Client Protocol: JSON-RPC 2.0, one object per line, on its standard streams.

The connection is the package `agent-client-protocol`'s. The line transport is ours, because an agent may write a line
of 20 MB, a megabyte of text that is no protocol, or JSON that is no message. Importing the package's models takes most
of a second, so it is imported when an agent starts, not by every command.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture import json
from sandbox.agents.agent_run import AgentRun
from sandbox.containers.base import STDOUT, CommandResult, Pipe
from sandbox.containers.streams import HeadTail, LineSplitter
from sandbox.errors import AgentError

if TYPE_CHECKING:
    from acp.connection import Connection
    from acp.exceptions import RequestError

#: Longest line that is read as a message.
MAX_LINE = 64 << 20
#: Messages that wait to be read before the agent is made to wait.
MAX_QUEUED = 256


def talk(
    agent_run: AgentRun, argv: Sequence[str], env: Mapping[str, str], *, name: str, hint: str = "",
    model_id: str | None = None, meta: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """Starts an agent that speaks ACP and holds a conversation with it, see `converse`."""
    prepared = agent_run.prepared
    variables = {**env, **agent_run.env, "HOME": prepared.home}
    pipe = agent_run.sandbox.open(argv, user=prepared.user, env=variables, cwd=prepared.workdir)
    try:
        return converse(agent_run, pipe, name=name, hint=hint, model_id=model_id, meta=meta)
    finally:
        pipe.close()


def converse(
    agent_run: AgentRun, pipe: Pipe, *, name: str, hint: str = "", model_id: str | None = None,
    meta: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """Gives the prompt to the agent behind `pipe` and returns its stop reason.

    Raises `AgentError`: `acp_error` for a violation of the protocol or an answer that takes longer than the handshake
    may, `pipe_closed` for an agent that ended, `timeout` when the prompt exceeded its budget. `hint` says what to try
    when the agent never started; `model_id` is set if the agent starts with another model; `meta` goes with
    `session/new`: settings that only this agent knows.
    """
    return asyncio.run(_Conversation(agent_run, pipe, name, hint).run(model_id, meta))


class _Conversation:
    def __init__(self, agent_run: AgentRun, pipe: Pipe, name: str, hint: str) -> None:
        self.agent_run, self.name, self.hint = agent_run, name, hint
        self.failure: AgentError | None = None
        self.transport = LineTransport(pipe, agent_run.logs / f"{name}.txt")
        self.pipe = pipe

    async def run(self, model_id: str | None, meta: dict[str, Any] | None) -> str:
        from acp.connection import Connection
        from acp.exceptions import RequestError

        self.transport.start()
        self.agent_run.trajectory.source = "acp"
        connection = Connection(self.handle, self.transport)
        try:
            session = await self.open_session(connection, model_id, meta)
            self.agent_run.trajectory.text("user_message", self.agent_run.prompt)
            self.agent_run.begin()
            return await self.prompt(connection, session)
        except AgentError:
            raise
        except RequestError as error:
            raise AgentError(f"{self.name} answered with an error: {_describe(error)}", "acp_error") from error
        except (ConnectionError, OSError) as error:
            raise self.ended_early() from error
        finally:
            with contextlib.suppress(Exception):
                await connection.close()

    async def open_session(self, connection: Connection, model_id: str | None, meta: dict[str, Any] | None) -> str:
        from acp.meta import PROTOCOL_VERSION

        about = await self.request(
            connection,
            "initialize",
            {
                "protocolVersion": PROTOCOL_VERSION,
                "clientCapabilities": {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False},
                "clientInfo": {"name": "benchflow-sidecar", "version": "1"},
            },
        )
        reported = json.as_object(about.get("agentInfo")).get("name")
        self.agent_run.reported_name = reported if reported and isinstance(reported, str) else self.name
        cwd = self.agent_run.prepared.workdir
        params = {"cwd": cwd, "mcpServers": [], **({"_meta": meta} if meta else {})}
        new = await self.request(connection, "session/new", params)
        session = new.get("sessionId")
        if not isinstance(session, str):
            raise AgentError(f"{self.name} gave no session id", "acp_error")
        current = json.as_object(new.get("models")).get("currentModelId")
        if model_id is not None and current not in (None, model_id):
            await self.request(connection, "session/set_model", {"sessionId": session, "modelId": model_id})
        return session

    async def request(self, connection: Connection, method: str, params: dict[str, Any]) -> dict[str, Any]:
        seconds = self.agent_run.handshake_seconds
        try:
            return json.as_object(await asyncio.wait_for(connection.send_request(method, params), seconds))
        except TimeoutError as error:
            sentence = f"{self.name} did not answer {method} within {seconds:g} s"
            raise AgentError(f"{sentence}; {self.hint}" if self.hint else sentence, "acp_error") from error

    async def prompt(self, connection: Connection, session: str) -> str:
        text = {"type": "text", "text": self.agent_run.prompt}
        request = connection.send_request("session/prompt", {"sessionId": session, "prompt": [text]})
        try:
            answer = await asyncio.wait_for(request, self.agent_run.seconds_left())
        except TimeoutError as error:
            with contextlib.suppress(Exception):  # a hung agent may hang here too
                await asyncio.wait_for(connection.send_notification("session/cancel", {"sessionId": session}), 2)
            raise self.agent_run.out_of_time() from error
        reason = json.as_object(answer).get("stopReason")
        return reason if reason and isinstance(reason, str) else "end_turn"

    async def handle(self, method: str, params: Any, is_notification: bool) -> Any:
        """The agent's own messages: it reports what it does, and asks for permission, which it gets."""
        from acp.exceptions import RequestError

        params = json.as_object(params)
        if method == "session/update":
            try:
                self.update(json.as_object(params.get("update")))
            except AgentError as error:
                self.failure = error
                self.transport.end()
            return None
        if method == "session/request_permission":
            return permission(params.get("options"))
        if is_notification:  # an extension of the agent's own, such as codex-acp's `_auth/status_update`
            return None
        raise RequestError.method_not_found(method)

    def update(self, update: dict[str, Any]) -> None:
        kind = update.get("sessionUpdate")
        if kind in ("agent_message_chunk", "agent_thought_chunk"):
            text = json.as_object(update.get("content")).get("text")
            if isinstance(text, str) and text.strip("\n"):
                self.agent_run.trajectory.text(kind.removesuffix("_chunk"), text)
        elif kind in ("tool_call", "tool_call_update"):
            self.agent_run.trajectory.tool(
                update.get("toolCallId"),
                kind=update.get("kind"),
                title=update.get("title"),
                status=update.get("status"),
                content=update.get("content"),
                raw_input=update.get("rawInput"),
                raw_output=update.get("rawOutput"),
            )

    def ended_early(self) -> AgentError:
        """Why an agent ended before its turn did."""
        if self.failure is not None:
            return self.failure
        if self.transport.line_too_long:
            limit = MAX_LINE >> 20
            return AgentError(f"{self.name} wrote a line of more than {limit} MB, which is no message", "acp_error")
        result = CommandResult(self.pipe.exit_code(), b"", self.transport.stderr.value())
        error = self.agent_run.died(self.name, result)
        category = "pipe_closed" if error.category == "agent_error" else error.category
        return AgentError(f"{error} (it ended before its turn did)", category)


def permission(options: object) -> dict[str, Any]:
    """The answer that lets the agent continue; its sandbox is the limit, not its permissions."""
    offered = json.objects(options)
    wanted = ("bypassPermissions", "allow_always", "allow_once")
    ranked = [o for want in wanted for o in offered if want in (o.get("optionId"), o.get("kind"))]
    chosen = next(iter(ranked or offered), None)
    if chosen is None:
        return {"outcome": {"outcome": "cancelled"}}
    return {"outcome": {"outcome": "selected", "optionId": chosen.get("optionId")}}


class LineTransport:
    """Messages over a pipe, which a thread reads. Lines that are no messages go to `log`."""

    def __init__(self, pipe: Pipe, log: Path) -> None:
        self.stderr = HeadTail(64 << 10)
        self.line_too_long = False
        self._pipe = pipe
        self._log = log
        self._other_lines = HeadTail(1 << 20)
        self._slots = threading.Semaphore(MAX_QUEUED)
        self._ended = threading.Event()
        self._lines = LineSplitter(self._on_line, MAX_LINE)
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, name="acp-reader", daemon=True).start()

    async def send(self, message: dict[str, Any]) -> None:
        data = json.dumps_as_read(message) + b"\n"
        await asyncio.get_running_loop().run_in_executor(None, self._pipe.write, data)

    async def receive(self) -> dict[str, Any] | None:
        message = await self._queue.get()
        self._slots.release()
        return message

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """No more messages: the reader stops, and the lines that were no messages are written to the log."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._queue.put_nowait(None)
        self._pipe.close_stdin()
        with contextlib.suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.write_bytes(self._other_lines.value() + self.stderr.value())

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
                self.line_too_long = True
                break
        self._post(None)

    def _on_line(self, line: bytes) -> None:
        if self._lines.too_long:  # what follows may be the end of a turn that lost a message
            return
        message = json.loads_or_none(line)
        if is_message(message):
            while not self._slots.acquire(timeout=1.0):
                if self._ended.is_set():
                    return
            self._post(message)
        elif line.strip():
            self._other_lines.add(line + b"\n")

    def _post(self, message: dict[str, Any] | None) -> None:
        assert self._loop is not None
        put: Callable[[dict[str, Any] | None], None] = self._queue.put_nowait
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for messages any more
            self._loop.call_soon_threadsafe(put, message)


def is_message(value: object) -> bool:
    """Whether a value is a JSON-RPC message that the connection can handle; others would end its receive loop."""
    if not isinstance(value, dict) or not ("method" in value or "id" in value):
        return False
    method, number, error = value.get("method"), value.get("id"), value.get("error")
    return (
        (method is None or isinstance(method, str))
        and (number is None or isinstance(number, str | int | float))
        and (error is None or isinstance(error, dict))
    )


def _describe(error: RequestError) -> str:
    details = json.as_object(getattr(error, "data", None)).get("details")
    return f"{error}: {details}" if details else str(error)
