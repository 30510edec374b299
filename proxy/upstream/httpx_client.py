"""The client for https upstreams: hosted APIs, also behind HTTP proxies. It uses httpx."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from http.cookiejar import DefaultCookiePolicy

import httpx

from proxy.errors import UpstreamBroke, UpstreamTimeout, UpstreamUnreachable
from proxy.http.headers import Headers
from proxy.settings import Timeouts
from proxy.upstream.client import LARGEST, read_all


class HostedClient:
    """The same interface as `HttpClient`, for an https upstream."""

    def __init__(self, url: str, timeouts: Timeouts | None = None) -> None:
        bounds = timeouts or Timeouts()
        self._url = url.rstrip("/")
        self._bounds = bounds
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(bounds.first_byte, connect=bounds.connect),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=5),
            follow_redirects=False,
        )
        # A cookie that the API sets in one session must not reach another.
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    async def send(self, method: str, path: str, headers: Headers, body: bytes) -> HostedResponse:
        request = self._client.build_request(method, self._url + path, headers=headers, content=body or None)
        try:
            async with asyncio.timeout(self._bounds.connect + self._bounds.first_byte):  # httpx's own is for each read
                answer = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise UpstreamUnreachable("the API cannot be reached") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise UpstreamTimeout(f"the API did not begin to answer within {self._bounds.first_byte:g} s") from error
        except httpx.HTTPError as error:
            raise UpstreamBroke("the connection to the API broke before an answer came") from error
        # One read timeout serves both waits in httpx, and it is read again when the body is: now it bounds silence.
        request.extensions["timeout"]["read"] = self._bounds.idle
        return HostedResponse(answer)

    async def close(self) -> None:
        await self._client.aclose()


class HostedResponse:
    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self._limit: asyncio.Timeout | None = None
        self.status = answer.status_code
        self.headers: Headers = [(name.lower(), value) for name, value in answer.headers.raw]

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._answer.aiter_bytes():
                yield data
        except httpx.TimeoutException as error:
            raise UpstreamTimeout("the API sent nothing more in time") from error
        except httpx.HTTPError as error:
            raise UpstreamBroke("the API's answer broke off in the middle") from error

    async def pump(self, take: Callable[[bytes], bool], room: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(None) as self._limit:
                async for data in self.chunks():
                    if not take(data):
                        await room()
        except TimeoutError as error:
            raise UpstreamTimeout("the API did not end its answer") from error

    def end_within(self, seconds: float) -> None:
        if self._limit is not None and self._limit.when() is None:
            self._limit.reschedule(asyncio.get_running_loop().time() + seconds)

    async def read(self, largest: int = LARGEST) -> bytes:
        return await read_all(self, largest)

    def close(self) -> None:
        task = asyncio.ensure_future(self._answer.aclose())
        _closing.add(task)
        task.add_done_callback(_closing.discard)


#: httpx closes asynchronously; the tasks are held until they are done.
_closing: set[asyncio.Future[None]] = set()
