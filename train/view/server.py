"""The page on this machine: Starlette, answers as JSON, and a listener that nobody else's web page can reach."""

from __future__ import annotations

import ipaddress
import socket
import threading
import webbrowser
from collections.abc import Callable
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from train.errors import BadInput, NoSuchPath, TrainError
from train.view import page
from train.view.api import View

#: Of answers: where scripts, styles and data may come from, and that nobody may frame or keep them.
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src {page.script_policy(inline=False)}; style-src 'self'; connect-src 'self'; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(view: View, *, host: str = "127.0.0.1") -> ASGIApp:
    """Routes of the page. `host` is the name that the server listens on: the `Host` header may name it."""

    def document(_: Request) -> Response:
        return _plain(
            page.html(
                style_tag='<link rel="stylesheet" href="style.css">',
                scripts=page.scripts(inline=False),
                title=f"{view.index.root.resolve().name} - bench view",
            ),
            "text/html",
        )

    def answer(request: Request) -> Response:
        words = dict(request.query_params)
        try:
            body, status = view.answer(request.path_params["question"], words), 200
        except NoSuchPath as error:
            body, status = {"error": str(error)}, 404
        except TrainError as error:
            body, status = {"error": str(error)}, 400
        return Response(dumps(body), status, {"Content-Type": "application/json"})

    app = Starlette(
        routes=[
            Route("/", document),
            *(
                Route(f"/static/{file}", lambda _, name=name: _plain(page.module(name), "text/javascript"))
                for name, file in page.MODULES.items()
            ),
            Route("/style.css", lambda _: _plain(page.style(), "text/css")),
            Route("/api/{question}", answer),
        ]
    )
    return Guard(app, host)


class Guard:
    """Answers only to a name of this machine: a web page elsewhere cannot make a name of its own lead here."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if not self._ours(host):
            refusal = PlainTextResponse("bench view answers to the address it printed, and to no other name\n", 421)
            await refusal(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        await self._app(scope, receive, guarded)

    def _ours(self, header: str) -> bool:
        name = header.rpartition(":")[0] if not header.endswith("]") and ":" in header else header
        name = name.strip("[]").lower()
        return name in ("localhost", self._host.lower(), socket.gethostname().lower()) or _is_address(name)


def serve(
    view: View,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Serves until it is interrupted. Raises `BadInput` where it cannot listen."""
    listener = listen(host, port)
    shown = "localhost" if host in ("0.0.0.0", "::", "") else host  # noqa: S104 - compared, not bound
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
    server = uvicorn.Server(
        uvicorn.Config(make_app(view, host=host), log_level="warning", access_log=False, lifespan="off")
    )
    view.index.start()
    say(f"{view.root} is shown at {address} (Ctrl-C ends it)")
    if open_browser:
        threading.Thread(target=open_page, args=(address, say), daemon=True).start()
    try:
        server.run(sockets=[listener])
    finally:
        view.index.stop()
        listener.close()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises `BadInput`: the port is taken, no such host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)  # clients may connect as soon as the address is printed
    except OSError as error:
        raise BadInput(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --port, or none for a free "
            "one"
        ) from error
    return listener


def open_page(address: str, say: Callable[[str], None]) -> None:
    """Opens the browser, or says what to do instead."""
    try:
        opened = webbrowser.open(address)
    except webbrowser.Error:
        opened = False
    if not opened:
        say(f"no browser could be opened here: open {address} yourself, or use --html FILE or --text")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def dumps(value: Any) -> bytes:
    """Floats that are no numbers become null; the parts of a token become lists."""
    return orjson.dumps(value, default=_plainly, option=orjson.OPT_NON_STR_KEYS)


def _plainly(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else str(value)


def _plain(text: str, kind: str) -> Response:
    return Response(text, media_type=kind)
