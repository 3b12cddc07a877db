"""Client of the broker: each request returns a typed answer.

A request that did not reach the broker is retried for `RETRY_S` if that is safe: reads,
writes with an idempotency key, and writes that the caller marks ``repeatable``.  (A managed
broker restarts within 1 s.)  Then `BrokerUnavailable` is raised, and callers continue
without the broker.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import httpx

from jupyter_gpushare import channel
from jupyter_gpushare.errors import (
    BrokerStopped,
    BrokerUnavailable,
    Conflict,
    DiskFull,
    InvalidRequest,
    KeyReused,
    NotAllowed,
    NotFound,
    NotSetUp,
    RequestError,
    TooMany,
)
from jupyter_gpushare.protocol import wire

T = TypeVar("T")
# A list stands for a repeated parameter.
Params = Mapping[str, str | int | float | list[str]]

# The broker's parent restarts it within 1 s; the rest is for its recovery.
RETRY_S = 5.0
_PAUSE_S = 0.2
_PATIENT_S = 2.0
# Statuses of the Hub's proxy while the broker restarts, and of a broker that does not reach the Hub.
_AWAY = (502, 503, 504)
# The wait after a 429 without Retry-After, which is not the broker's.
_RETRY_AFTER_S = 60.0
_BY_STATUS: Mapping[int, type[RequestError]] = {
    400: InvalidRequest,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    413: InvalidRequest,
    422: KeyReused,
    507: DiskFull,
}


def _answer(response: httpx.Response, kind: type[T]) -> T:
    """Return the typed answer, or raise the broker's refusal."""
    status = response.status_code
    degraded = status == 503 and kind is wire.Health  # the body names the faults
    if status >= 500 and status not in _BY_STATUS and not degraded:
        raise BrokerUnavailable("the GPU broker answered %1", status)
    if status >= 400 and not degraded:
        try:
            error = wire.decode_answer(response.content, wire.ErrorAnswer)
        except BrokerUnavailable:
            error = wire.ErrorAnswer(
                status=status, reason="refused", message=f"the GPU broker answered {status}"
            )
        if status == 429:
            given = response.headers.get("Retry-After", "")
            raise TooMany(
                *error.parts,
                reason=error.reason,
                retry_after_s=float(given) if given.isascii() and given.isdigit() else _RETRY_AFTER_S,
            )
        raise _BY_STATUS.get(status, RequestError)(*error.parts, reason=error.reason)
    if kind is type(None) or status == 204:
        return None  # type: ignore[return-value]
    return wire.decode_answer(response.content, kind)


def _is_answer(response: httpx.Response) -> bool:
    """Return whether a broker with this path answered, not the Hub or another program or version."""
    if response.status_code != 404:
        return not response.is_redirect
    try:
        return wire.decode_answer(response.content, wire.ErrorAnswer).reason != wire.NO_SUCH_PATH
    except BrokerUnavailable:
        return False


class BrokerClient:
    """Connection to the broker for asyncio: spawner, server extension, job runner."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        certificate: str = "",
        timeout_s: float = 10.0,
        retry_s: float = RETRY_S,
        waiting: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare connections to ``url``; see `channel` for its forms and for ``certificate``.

        ``waiting`` is called with a message, once per request that is retried longer than `_PATIENT_S`.

        Raises:
            InvalidRequest: ``url`` is not an address of a broker.
        """
        self.address = channel.parse(url, certificate)
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"token {token}"} if token else {}
        self._retry_s = retry_s
        self._waiting = waiting
        self._http = httpx.AsyncClient(
            timeout=timeout_s, trust_env=False, transport=channel.async_transport(self.address)
        )

    async def request(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: Any = None,
        *,
        params: Params | None = None,
        key: str | None = None,
        repeatable: bool = False,
        await_start: bool = True,
        timeout_s: float | None = None,
    ) -> T:
        """Return the broker's answer as ``kind``, which is ``type(None)`` if no content is expected.

        With ``await_start=False`` a broker that does not run is not retried; a managed broker keeps its
        sockets open while it restarts.

        Raises:
            RequestError: the broker refused the request; the text is for the user.
            BrokerStopped: no process listens at the broker's address.
            NotSetUp: the process that listens there does not know the path.
            BrokerUnavailable: the broker did not answer within the retry time.
        """
        headers = dict(self._headers)
        if key is not None:
            headers["Idempotency-Key"] = key
        if body is not None:
            headers["Content-Type"] = "application/json"
        request = self._http.build_request(
            method,
            f"{self.address.url}/{path}",
            content=None if body is None else wire.encode(body),
            params=params,
            headers=headers,
            timeout=httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s,
        )
        is_repeatable = method == "GET" or key is not None or repeatable
        began_at, notified = time.monotonic(), self._waiting is None
        until = began_at + (self._retry_s if is_repeatable else 0.0)
        while True:
            try:
                response = await self._http.send(request)
                is_away = response.status_code in _AWAY and kind is not wire.Health
                if not _is_answer(response):
                    raise NotSetUp(
                        "no GPU broker of this version answers at %1 (%2 for %3)",
                        *(self.url, response.status_code, request.url.path),
                    )
                if not is_away or time.monotonic() >= until:
                    return _answer(response, kind)
                pause_s = _PAUSE_S
            except httpx.TransportError as error:
                is_gone = isinstance(error, httpx.ConnectError) and not await_start
                if is_gone or time.monotonic() >= until:
                    raise self._unreachable(error) from None
                pause_s = _PAUSE_S
            except TooMany as error:
                # A script that submits many jobs is slowed down, not refused.
                if time.monotonic() + error.retry_after_s > until:
                    raise
                pause_s = error.retry_after_s
            if not notified and self._waiting is not None and time.monotonic() - began_at >= _PATIENT_S:
                notified = True
                self._waiting(
                    f"the GPU broker at {self.url} does not answer; asking for {self._retry_s:.0f} s"
                )
            await asyncio.sleep(pause_s)

    def _unreachable(self, error: httpx.TransportError) -> BrokerUnavailable:
        is_unverified = isinstance(error.__cause__, channel.Unverified)
        why = str(error) if is_unverified else type(error).__name__
        is_stopped = isinstance(error, httpx.ConnectError) and not is_unverified
        if is_stopped:
            return BrokerStopped("the GPU broker at %1 does not answer (%2)", self.url, why)
        return BrokerUnavailable("the GPU broker at %1 does not answer (%2)", self.url, why)

    async def get(self, path: str, kind: type[T], **options: Any) -> T:
        """Return the broker's answer as ``kind``; options and errors as in `request`."""
        return await self.request("GET", path, kind, **options)

    async def post(self, path: str, body: Any, kind: type[T], **options: Any) -> T:
        """Send ``body``; return the broker's answer as ``kind``; options and errors as in `request`."""
        return await self.request("POST", path, kind, body, **options)

    async def put(self, path: str, body: Any, kind: type[T], **options: Any) -> T:
        """Replace the resource at ``path``; return the answer; options and errors as in `request`."""
        return await self.request("PUT", path, kind, body, **options)

    async def delete(self, path: str, kind: type[T], **options: Any) -> T:
        """Delete the resource at ``path``; return the answer; options and errors as in `request`."""
        return await self.request("DELETE", path, kind, **options)

    async def close(self) -> None:
        """Close the connections to the broker."""
        await self._http.aclose()


class BlockingClient:
    """A `BrokerClient` for code that is not async: the command line and notebook magics.

    Requests run on an event loop in a thread, because a notebook's own thread already runs one.
    """

    def __init__(self, url: str, token: str, **options: Any) -> None:
        """Prepare connections; options and errors are those of `BrokerClient`."""
        self._client = BrokerClient(url, token, **options)
        self.address = self._client.address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def get(self, path: str, kind: type[T], **options: Any) -> T:
        """Return the broker's answer; this method and the next three raise like `BrokerClient.request`."""
        return self._run(self._client.get(path, kind, **options))

    def post(self, path: str, body: Any, kind: type[T], **options: Any) -> T:
        """Send ``body``; return the broker's answer as ``kind``."""
        return self._run(self._client.post(path, body, kind, **options))

    def put(self, path: str, body: Any, kind: type[T], **options: Any) -> T:
        """Replace the resource at ``path``; return the broker's answer as ``kind``."""
        return self._run(self._client.put(path, body, kind, **options))

    def delete(self, path: str, kind: type[T], **options: Any) -> T:
        """Delete the resource at ``path``; return the broker's answer as ``kind``."""
        return self._run(self._client.delete(path, kind, **options))

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, request: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt leaves no request behind
            future.cancel()
            raise
