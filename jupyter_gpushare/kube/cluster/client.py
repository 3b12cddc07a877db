"""Requests to the Kubernetes API: lists, watches, creations, merge patches and deletions.

``kubernetes_asyncio`` handles connections, TLS and credentials.  This module decodes the bytes of an
answer itself, and only the fields that the broker uses.

Every request is safe to repeat: the broker chooses the names of objects, and a patch sets values.  A request
is retried until ``deadline_s`` if the API server does not answer, or answers 429 or 5xx.  The delay doubles,
is partly random, and is at least ``Retry-After``.  After a 401 there is one retry, with the
token that its file has by then.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from jupyter_gpushare.kube.cluster import library
from jupyter_gpushare.kube.cluster.api_server import ApiServer, KubeError
from jupyter_gpushare.kube.cluster.objects import Json, Object, Resource

T = TypeVar("T", bound=Object)

PAGE = 500
_DEADLINE_S = 10.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0
_RETRIED_STATUSES = (429, 500, 502, 503, 504)
_UNAUTHORIZED, _CONFLICT, _GONE = 401, 409, 410
_SUCCESS = range(200, 300)
_MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}
_CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError)
# For an event above 4 MiB, aiohttp raises one of these, depending on its version.  The largest object has
# 1.5 MiB.
_TOO_LONG = (aiohttp.http.HttpProcessingError, ValueError)
_READ_BYTES = 2 << 20


class Expired(KubeError):
    """The API server no longer has the version that a watch or list continues from; list again."""


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """All objects of a list, at one version of the collection."""

    items: list[T]
    version: str


@dataclass(frozen=True, slots=True)
class WatchEvent(Generic[T]):
    """One event: ``ADDED``, ``MODIFIED``, ``DELETED``, or ``BOOKMARK``, which has only a version."""

    type: str
    version: str
    object: T | None


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct, Generic[T]):
    metadata: _ListMeta
    items: list[T] = []


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    message: str = ""
    code: int = 0


class _Session:
    """The library's session, without redirects, and without proxies and passwords of the environment."""

    def __init__(self, replaced: aiohttp.ClientSession) -> None:
        self._session = aiohttp.ClientSession(connector=replaced.connector, read_bufsize=_READ_BYTES)
        replaced.detach()

    async def request(self, **options: Any) -> aiohttp.ClientResponse:
        return await self._session.request(allow_redirects=False, **options)

    async def close(self) -> None:
        await self._session.close()


class ApiClient:
    """Sends requests to one API server."""

    def __init__(
        self,
        server: ApiServer,
        *,
        deadline_s: float = _DEADLINE_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._deadline_s, self._sleep, self._clock = server, deadline_s, sleep, clock
        self._api: library.ApiClient | None = None
        self._opening = asyncio.Lock()

    async def connect(self) -> library.ApiClient:
        """Return the library's client, which the first call creates.

        Raises:
            KubeError: a file with credentials or certificates cannot be used.
        """
        async with self._opening:
            if self._api is None:
                config = await self._server.configuration()
                try:
                    api = library.ApiClient(config)
                except OSError as error:  # includes ssl.SSLError
                    raise KubeError(f"the certificates for {config.host} cannot be used: {error}") from None
                finally:
                    library.remove_files()
                api.rest_client.pool_manager = _Session(api.rest_client.pool_manager)  # type: ignore[assignment]
                self._api = api
            return self._api

    async def close(self) -> None:
        """Close all connections."""
        if self._api is not None:
            await self._api.close()

    async def list(self, kind: Resource[T], namespace: str = "", selector: str = "") -> Listing[T]:
        """Return all objects whose labels match ``selector``; they are read in pages.

        Raises:
            KubeError: refused, or no answer within the deadline.
        """
        for _ in range(3):
            try:
                return await self._pages(kind, namespace, selector)
            except Expired:
                continue  # the next page's version was too old
        raise KubeError(f"the list of {kind.plural} changes faster than it can be read", status=_GONE)

    async def _pages(self, kind: Resource[T], namespace: str, selector: str) -> Listing[T]:
        items: list[T] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            response = await self._send("GET", kind.path(namespace), query_params=query)
            page: _Page[T] = await _decoded(response, _Page[kind.type])  # type: ignore[name-defined]
            items += page.items
            if not page.metadata.continue_:
                return Listing(items, page.metadata.resource_version)
            query["continue"] = page.metadata.continue_

    async def create(self, kind: Resource[T], namespace: str, body: Json) -> T:
        """Create an object and return it; a retry may find that the first request has created it.

        Raises:
            KubeError: refused, or no answer within the deadline.
        """
        response = await self._send("POST", kind.path(namespace), body=body, or_exists=True)
        if response.status == _CONFLICT:
            response = await self._send("GET", kind.path(namespace, body["metadata"]["name"]))
        created: T = await _decoded(response, kind.type)
        return created

    async def patch(self, kind: Resource[T], namespace: str, name: str, body: Json) -> T:
        """Apply a merge patch (RFC 7386), only to its ``metadata.resourceVersion`` if set; return the object.

        Raises:
            KubeError: refused (404, 409), or no answer within the deadline.
        """
        response = await self._send(
            "PATCH", kind.path(namespace, name), body=body, header_params=_MERGE_PATCH
        )
        patched: T = await _decoded(response, kind.type)
        return patched

    async def delete(self, kind: Resource[T], namespace: str, name: str, *, version: str = "") -> bool:
        """Delete an object with its own grace period; return False if it does not exist.

        With ``version``, delete only that version.

        Raises:
            KubeError: refused (409: another version), or no answer within the deadline.
        """
        body = {"preconditions": {"resourceVersion": version}} if version else {}
        try:
            await self._send("DELETE", kind.path(namespace, name), body=body)
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def is_allowed(self, verb: str, group: str, resource: str, namespace: str = "") -> bool:
        """Return whether this account has a right; without ``namespace``, in the whole cluster.

        Raises:
            KubeError: refused, or no answer within the deadline.
        """
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        response = await self._send("POST", path, body={**body, "spec": {"resourceAttributes": attributes}})
        review: Json = await _decoded(response, dict)
        return bool(review.get("status", {}).get("allowed"))

    async def watch(
        self, kind: Resource[T], version: str, *, namespace: str = "", selector: str = "", duration_s: int = 5
    ) -> AsyncIterator[WatchEvent[T] | None]:
        """Yield None when the API server starts to answer, then events since ``version`` for ``duration_s``.

        Raises:
            Expired: the API server no longer has the version.
            KubeError: refused, or the connection was cut.
        """
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(duration_s)}
        query |= {"allowWatchBookmarks": "true"} | ({"labelSelector": selector} if selector else {})
        timeout_s = duration_s + self._deadline_s
        response = await self._send(
            "GET", kind.path(namespace), watch_timeout_s=timeout_s, query_params=query
        )
        try:
            async with response:
                yield None
                async for line in response.content:
                    yield _event(line, kind)
        except (*_CONNECTION_ERRORS, *_TOO_LONG) as error:
            raise KubeError(f"the watch of {kind.plural} was cut ({type(error).__name__})") from None

    async def _send(
        self, method: str, path: str, *, or_exists: bool = False, watch_timeout_s: float = 0.0, **request: Any
    ) -> aiohttp.ClientResponse:
        """Send a request, with retries; return the answer, whose content has been read unless it is a watch.

        ``or_exists`` accepts a 409 in a retry, because an earlier attempt may have created the object.

        Raises:
            KubeError: refused, or no answer within the deadline.
        """
        request |= {"auth_settings": ["BearerToken"], "_preload_content": False}
        request |= {"_request_timeout": watch_timeout_s or self._deadline_s}
        deadline_at, tries, was_unauthorized = self._clock() + self._deadline_s, 0, False
        while True:
            api, delay_s = await self.connect(), backoff_s(tries)
            try:
                response: aiohttp.ClientResponse = await api.call_api(path, method, **request)
                is_success = response.status in _SUCCESS
                if not (watch_timeout_s and is_success):
                    await response.read()
            except _CONNECTION_ERRORS as error:
                failure = KubeError(f"the API server does not answer ({type(error).__name__})")
            else:
                if is_success or (or_exists and tries and response.status == _CONFLICT):
                    return response
                failure = _refusal(await response.read(), response.status)
                if response.status == _UNAUTHORIZED and not was_unauthorized:
                    was_unauthorized = True  # its token may have been replaced meanwhile
                elif response.status not in _RETRIED_STATUSES:
                    raise failure
                delay_s = max(delay_s, _seconds(response.headers.get("Retry-After", "")))
            tries += 1
            if self._clock() + delay_s > deadline_at:
                raise failure
            await self._sleep(delay_s)


def backoff_s(tries: int) -> float:
    """Return the delay after ``tries`` failures: it doubles up to 5 s, less up to half of it at random."""
    longest_s: float = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(tries, 10))
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 (spreads requests; not for secrets)


def _seconds(retry_after: str) -> int:
    return int(retry_after) if retry_after.isascii() and retry_after.isdigit() else 0


async def _decoded(response: aiohttp.ClientResponse, kind: type[Any]) -> Any:
    return _parsed(await response.read(), kind)


def _parsed(content: bytes | msgspec.Raw, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise KubeError(f"the answer of the API server is not understood: {error}") from None


def _refusal(content: bytes | msgspec.Raw, status: int = 0) -> KubeError:
    try:
        answer = msgspec.json.decode(content, type=_Status)
    except msgspec.MsgspecError:
        answer = _Status()
    status = status or answer.code
    kind = Expired if status == _GONE else KubeError
    return kind(f"the API server refused: {answer.message[:300] or f'status {status}'}", status=status)


def _event(line: bytes, kind: Resource[T]) -> WatchEvent[T]:
    event: _Event = _parsed(line, _Event)
    if event.type == "ERROR":
        raise _refusal(event.object)
    if event.type == "BOOKMARK":
        bookmark: Json = _parsed(event.object, dict)
        return WatchEvent("BOOKMARK", bookmark.get("metadata", {}).get("resourceVersion", ""), None)
    found: T = _parsed(event.object, kind.type)
    return WatchEvent(event.type, found.metadata.resource_version, found)
