"""Talks to the broker: one request, one typed answer.

Both clients repeat a request that did not reach the broker for `RETRY_S`
seconds (a managed broker is restarted within one), when repeating is safe:
reads, and writes that the caller marks ``repeatable``.  After that they raise
`BrokerUnavailable`, and the caller goes on without.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from jupyter_gpushare import wire
from jupyter_gpushare.errors import (
    BrokerUnavailable,
    Conflict,
    InvalidRequest,
    NotAllowed,
    NotFound,
    RequestError,
    TooMany,
)

T = TypeVar("T")
# A list is a parameter that is given several times.
Params = Mapping[str, str | int | float | list[str]]

# The broker's parent starts it again within a second; a little more for its recovery.
RETRY_S = 5.0
_PAUSE_S = 0.2
_BY_STATUS: Mapping[int, type[RequestError]] = {
    400: InvalidRequest,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    413: InvalidRequest,
    429: TooMany,
}


def _answer(response: httpx.Response, kind: type[T]) -> T:
    """Return the typed answer, or raise what the broker said."""
    degraded = response.status_code == 503 and kind is wire.Health  # then it says why
    if response.status_code >= 500 and not degraded:
        raise BrokerUnavailable(f"the GPU broker answered {response.status_code}")
    if response.status_code >= 400 and not degraded:
        try:
            said = msgspec.json.decode(response.content, type=wire.ErrorAnswer)
            message, reason = said.message, said.reason
        except msgspec.MsgspecError:
            message, reason = f"the GPU broker answered {response.status_code}", "refused"
        raise _BY_STATUS.get(response.status_code, RequestError)(message, reason=reason)
    if kind is type(None) or response.status_code == 204:
        return None  # type: ignore[return-value]
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.MsgspecError as error:
        raise BrokerUnavailable(f"the GPU broker answered something else than expected: {error}") from None


class _Requests:
    """What both clients share: the address, the token, the shape of a request."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"token {token}"}

    def _request(
        self,
        method: str,
        path: str,
        body: Any,
        params: Params | None,
        key: str | None,
    ) -> dict[str, Any]:
        headers = dict(self._headers)
        if key is not None:
            headers["Idempotency-Key"] = key
        if body is not None:
            headers["Content-Type"] = "application/json"
        return {
            "method": method,
            "url": f"{self.url}/{path}",
            "content": None if body is None else wire.encode(body),
            "params": params,
            "headers": headers,
        }

    def _lost(self, error: httpx.TransportError) -> BrokerUnavailable:
        return BrokerUnavailable(f"the GPU broker at {self.url} does not answer ({type(error).__name__})")


def _safe(method: str, key: str | None, repeatable: bool) -> bool:
    return method == "GET" or key is not None or repeatable


class BrokerClient(_Requests):
    """For asyncio: spawner, server extension, job runner."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 10.0, retry_s: float = RETRY_S) -> None:
        super().__init__(url, token)
        self._retry_s = retry_s
        self._http = httpx.AsyncClient(timeout=timeout_s, trust_env=False)

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
        timeout_s: float | None = None,
    ) -> T:
        """Return the broker's answer as ``kind`` (``type(None)``: none is expected).

        Raises:
            RequestError: the broker refused; the text is for the user.
            BrokerUnavailable: it did not answer within the retry time.
        """
        asked = self._request(method, path, body, params, key)
        if timeout_s is not None:
            asked["timeout"] = timeout_s
        until = time.monotonic() + (self._retry_s if _safe(method, key, repeatable) else 0.0)
        while True:
            try:
                return _answer(await self._http.request(**asked), kind)
            except httpx.TransportError as error:
                if time.monotonic() >= until:
                    raise self._lost(error) from None
            await asyncio.sleep(_PAUSE_S)

    async def get(self, path: str, kind: type[T], **options: Any) -> T:
        return await self.request("GET", path, kind, **options)

    async def post(self, path: str, body: Any, kind: type[T], **options: Any) -> T:
        return await self.request("POST", path, kind, body, **options)

    async def put(self, path: str, body: Any, kind: type[T], **options: Any) -> T:
        return await self.request("PUT", path, kind, body, **options)

    async def delete(self, path: str, kind: type[T], **options: Any) -> T:
        return await self.request("DELETE", path, kind, **options)

    async def close(self) -> None:
        await self._http.aclose()


class SyncBrokerClient(_Requests):
    """For the command line."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 10.0, retry_s: float = RETRY_S) -> None:
        super().__init__(url, token)
        self._retry_s = retry_s
        self._http = httpx.Client(timeout=timeout_s, trust_env=False)

    def request(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: Any = None,
        *,
        params: Params | None = None,
        key: str | None = None,
        repeatable: bool = False,
    ) -> T:
        """Return the broker's answer as ``kind``; raises like `BrokerClient.request`."""
        asked = self._request(method, path, body, params, key)
        until = time.monotonic() + (self._retry_s if _safe(method, key, repeatable) else 0.0)
        while True:
            try:
                return _answer(self._http.request(**asked), kind)
            except httpx.TransportError as error:
                if time.monotonic() >= until:
                    raise self._lost(error) from None
            time.sleep(_PAUSE_S)

    def get(self, path: str, kind: type[T], **options: Any) -> T:
        return self.request("GET", path, kind, **options)

    def post(self, path: str, body: Any, kind: type[T], **options: Any) -> T:
        return self.request("POST", path, kind, body, **options)

    def delete(self, path: str, kind: type[T], **options: Any) -> T:
        return self.request("DELETE", path, kind, **options)

    def close(self) -> None:
        self._http.close()
