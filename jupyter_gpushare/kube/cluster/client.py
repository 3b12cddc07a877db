"""Requests to the Kubernetes API: lists, watches, creations, merge patches and deletions.

Connections, TLS, proxies and credentials are those of ``kubernetes_asyncio``.  Of an answer only the fields
that we use are decoded, from its bytes.

Every request may be repeated: objects have names of our own choice, patches say values and not
changes.  A request is repeated while the API server does not answer, answers 429 (after the seconds
of ``Retry-After``) or 5xx, with a delay that doubles and is drawn at random, until ``deadline_s``;
and once after a 401, with credentials that are loaded anew.
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
_RETRIED = (429, 500, 502, 503, 504)
_UNAUTHORIZED, _CONFLICT, _GONE = 401, 409, 410
_MERGE_PATCH = {"Content-Type": "application/merge-patch+json"}
# The last two: an event is longer than 4 MiB, by the version of aiohttp; the largest object has 1.5 MiB.
_LOST = (aiohttp.ClientError, TimeoutError, aiohttp.http.HttpProcessingError, ValueError)


class Expired(KubeError):
    """The version that a watch or a list continues from is too old: list again."""


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """All objects of a list at one version."""

    items: list[T]
    version: str


@dataclass(frozen=True, slots=True)
class WatchEvent(Generic[T]):
    """One change: ``ADDED``, ``MODIFIED`` or ``DELETED``; ``BOOKMARK`` has a version only."""

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


class ApiClient:
    """Requests to one API server."""

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

    async def open(self) -> library.ApiClient:
        """Return the client of the library; the first request opens it.

        Raises:
            KubeError: a file with credentials or certificates cannot be used.
        """
        async with self._opening:
            if self._api is None:
                where = await self._server.configuration()
                try:
                    self._api = library.ApiClient(where)
                except OSError as error:  # of TLS, too
                    raise KubeError(f"the certificates for {where.host} cannot be used: {error}") from None
            return self._api

    async def close(self) -> None:
        """Close all connections."""
        if self._api is not None:
            await self._api.close()

    async def list(self, kind: Resource[T], namespace: str = "", selector: str = "") -> Listing[T]:
        """Return all objects that ``selector`` (labels) matches, in pages.

        Raises:
            KubeError: refused, or no answer within the deadline.
        """
        for _ in range(3):
            try:
                return await self._pages(kind, namespace, selector)
            except Expired:
                continue  # it changed too much between two pages
        raise KubeError(f"the list of {kind.plural} changes faster than it can be read", status=_GONE)

    async def _pages(self, kind: Resource[T], namespace: str, selector: str) -> Listing[T]:
        items: list[T] = []
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            response = await self._ask("GET", kind.path(namespace), query_params=query)
            page: _Page[T] = await _decoded(response, _Page[kind.type])  # type: ignore[name-defined]
            items += page.items
            if not page.metadata.continue_:
                return Listing(items, page.metadata.resource_version)
            query["continue"] = page.metadata.continue_

    async def create(self, kind: Resource[T], namespace: str, body: Json) -> T:
        """Create an object; one that a repeated request finds there counts as created.

        Raises:
            KubeError: refused, or no answer within the deadline.
        """
        response = await self._ask("POST", kind.path(namespace), body=body, or_exists=True)
        if response.status == _CONFLICT:
            response = await self._ask("GET", kind.path(namespace, body["metadata"]["name"]))
        created: T = await _decoded(response, kind.type)
        return created

    async def patch(self, kind: Resource[T], namespace: str, name: str, body: Json) -> T:
        """Apply a merge patch (RFC 7386); with ``metadata.resourceVersion`` only to that version.

        Raises:
            KubeError: refused (404, 409), or no answer within the deadline.
        """
        response = await self._ask("PATCH", kind.path(namespace, name), body=body, header_params=_MERGE_PATCH)
        patched: T = await _decoded(response, kind.type)
        return patched

    async def delete(self, kind: Resource[T], namespace: str, name: str, *, version: str = "") -> bool:
        """Delete an object with its own grace period; False: it does not exist.

        ``version``: only if it is still that version.

        Raises:
            KubeError: refused (409: another version), or no answer within the deadline.
        """
        body = {"preconditions": {"resourceVersion": version}} if version else {}
        try:
            await self._ask("DELETE", kind.path(namespace, name), body=body)
        except KubeError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def may(self, verb: str, group: str, resource: str, namespace: str = "") -> bool:
        """Whether this account has a right; without ``namespace`` in the whole cluster.

        Raises:
            KubeError: refused, or no answer within the deadline.
        """
        asked = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        response = await self._ask("POST", path, body={**body, "spec": {"resourceAttributes": asked}})
        review: Json = await _decoded(response, dict)
        return bool(review.get("status", {}).get("allowed"))

    async def watch(
        self, kind: Resource[T], version: str, *, namespace: str = "", selector: str = "", for_s: int = 5
    ) -> AsyncIterator[WatchEvent[T] | None]:
        """Yield None once the API server has begun to answer, then changes since ``version`` for ``for_s``.

        Raises:
            Expired: the API server does not know the version any more.
            KubeError: refused, or the connection was cut.
        """
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(for_s)}
        query |= {"allowWatchBookmarks": "true"} | ({"labelSelector": selector} if selector else {})
        until_s = for_s + self._deadline_s
        response = await self._ask("GET", kind.path(namespace), watch_s=until_s, query_params=query)
        try:
            async with response:
                yield None
                async for line in response.content:
                    yield _event(line, kind)
        except _LOST as error:
            raise KubeError(f"the watch of {kind.plural} was cut ({type(error).__name__})") from None

    async def _ask(
        self, method: str, path: str, *, or_exists: bool = False, watch_s: float = 0.0, **request: Any
    ) -> aiohttp.ClientResponse:
        """Send a request until it is answered; the content of the answer has been read, but for a watch.

        ``or_exists``: a 409 after a first try that may have succeeded is an answer.
        """
        request |= {"auth_settings": ["BearerToken"], "_preload_content": False}
        request |= {"_request_timeout": watch_s or self._deadline_s}
        until, tries = self._clock() + self._deadline_s, 0
        while True:
            api, delay_s = await self.open(), backoff_s(tries)
            try:
                response: aiohttp.ClientResponse = await api.call_api(path, method, **request)
                if not (watch_s and response.ok):
                    await response.read()
            except _LOST as error:
                failure = KubeError(f"the API server does not answer ({type(error).__name__})")
            else:
                if response.ok or (or_exists and tries and response.status == _CONFLICT):
                    return response
                failure = _refusal(await response.read(), response.status)
                if response.status == _UNAUTHORIZED and not tries:
                    api.configuration = await self._server.configuration()
                elif response.status not in _RETRIED:
                    raise failure
                delay_s = max(delay_s, _seconds(response.headers.get("Retry-After", "")))
            tries += 1
            if self._clock() + delay_s > until:
                raise failure
            await self._sleep(delay_s)


def backoff_s(tries: int) -> float:
    """Return the seconds to wait after ``tries`` failures: doubling, at most 5, half of it at random."""
    whole: float = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(tries, 10))
    return whole * random.uniform(0.5, 1.0)  # noqa: S311 (spreads requests, keeps no secret)


def _seconds(said: str) -> int:
    return int(said) if said.isascii() and said.isdigit() else 0


async def _decoded(response: aiohttp.ClientResponse, kind: type[Any]) -> Any:
    return _parsed(await response.read(), kind)


def _parsed(content: bytes | msgspec.Raw, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise KubeError(f"the answer of the API server is not understood: {error}") from None


def _refusal(content: bytes | msgspec.Raw, status: int = 0) -> KubeError:
    try:
        said = msgspec.json.decode(content, type=_Status)
    except msgspec.MsgspecError:
        said = _Status()
    status = status or said.code
    kind = Expired if status == _GONE else KubeError
    return kind(f"the API server refused: {said.message[:300] or f'status {status}'}", status=status)


def _event(line: bytes, kind: Resource[T]) -> WatchEvent[T]:
    event: _Event = _parsed(line, _Event)
    if event.type == "ERROR":
        raise _refusal(event.object)
    if event.type == "BOOKMARK":
        mark: Json = _parsed(event.object, dict)
        return WatchEvent("BOOKMARK", mark.get("metadata", {}).get("resourceVersion", ""), None)
    found: T = _parsed(event.object, kind.type)
    return WatchEvent(event.type, found.metadata.resource_version, found)
