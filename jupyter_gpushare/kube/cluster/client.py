"""A small client of the Kubernetes API: lists, watches, creations, merge patches and deletions.

Every request may be repeated: objects have names of our own choice, patches say values and not
changes.  A request is repeated while the API server does not answer, answers 429 (after the seconds
of ``Retry-After``) or 5xx, with a delay that doubles and is drawn at random, until ``deadline_s``.
The token of a service account is read again when its file may have changed, and after a 401.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from jupyter_gpushare.kube.cluster.api_server import ApiServer, KubeError
from jupyter_gpushare.kube.cluster.objects import (
    BindRequest,
    Json,
    Node,
    Object,
    OtherObject,
    Pod,
    PodGroup,
    Queue,
)

T = TypeVar("T", bound=Object)

PAGE = 500
_TOKEN_S = 30.0  # kubelet renews the file long before the token in it ends
_DEADLINE_S = 10.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0
_RETRIED = (429, 500, 502, 503, 504)
_GONE = 410


class Expired(KubeError):
    """The version that a watch or a list continues from is too old: list again."""


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """A kind of object: its path in the API, and its type."""

    group: str  # "" for the core group
    version: str
    plural: str
    type: type[T]
    namespaced: bool = True

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of the collection, or of one object."""
        head = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        inside = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{head}{inside}/{self.plural}" + (f"/{name}" if name else "")


PODS = Resource("", "v1", "pods", Pod)
POD_GROUPS = Resource("scheduling.run.ai", "v2alpha2", "podgroups", PodGroup)
BIND_REQUESTS = Resource("scheduling.run.ai", "v1alpha2", "bindrequests", BindRequest)
QUEUES = Resource("scheduling.run.ai", "v2", "queues", Queue, namespaced=False)
NODES = Resource("", "v1", "nodes", Node, namespaced=False)
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", Object, namespaced=False)
SHARDS = Resource("kai.scheduler", "v1", "schedulingshards", OtherObject, namespaced=False)
CLUSTER_POLICIES = Resource("nvidia.com", "v1", "clusterpolicies", OtherObject, namespaced=False)
CONFIGS = Resource("kai.scheduler", "v1", "configs", OtherObject, namespaced=False)


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


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] = []


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0


class _Allowed(msgspec.Struct):
    allowed: bool = False


class _Review(msgspec.Struct):
    status: _Allowed


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
        self._server = server
        self._deadline_s = deadline_s
        self._sleep = sleep
        self._clock = clock
        self._token, self._token_at = "", float("-inf")
        self._http = httpx.AsyncClient(
            base_url=server.url, verify=server.tls(), timeout=deadline_s, trust_env=False
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    # ---- objects -------------------------------------------------------------

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
        after = ""
        while True:
            query = {"limit": str(PAGE), "labelSelector": selector, "continue": after}
            given = {key: value for key, value in query.items() if value}
            response = await self._ask("GET", kind.path(namespace), params=given)
            page = _decoded(response.content, _List)
            items += [_decoded(bytes(raw), kind.type) for raw in page.items]
            after = page.metadata.continue_
            if not after:
                return Listing(items, page.metadata.resource_version)

    async def create(self, kind: Resource[T], namespace: str, body: Json) -> T:
        """Create an object; one that a repeated request finds there counts as created.

        Raises:
            KubeError: refused, or no answer within the deadline.
        """
        response = await self._ask("POST", kind.path(namespace), json=body, or_exists=True)
        if response.status_code == 409:
            response = await self._ask("GET", kind.path(namespace, body["metadata"]["name"]))
        created: T = _decoded(response.content, kind.type)
        return created

    async def patch(self, kind: Resource[T], namespace: str, name: str, body: Json) -> T:
        """Apply a merge patch (RFC 7386); with ``metadata.resourceVersion`` only to that version.

        Raises:
            KubeError: refused (404, 409), or no answer within the deadline.
        """
        headers = {"Content-Type": "application/merge-patch+json"}
        content = msgspec.json.encode(body)
        response = await self._ask("PATCH", kind.path(namespace, name), content=content, headers=headers)
        patched: T = _decoded(response.content, kind.type)
        return patched

    async def delete(self, kind: Resource[T], namespace: str, name: str, *, version: str = "") -> bool:
        """Delete an object with its own grace period; False: it does not exist.

        ``version``: only if it is still that version.

        Raises:
            KubeError: refused (409: another version), or no answer within the deadline.
        """
        body = {"preconditions": {"resourceVersion": version}} if version else {}
        try:
            await self._ask("DELETE", kind.path(namespace, name), json=body)
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
        response = await self._ask("POST", path, json={**body, "spec": {"resourceAttributes": asked}})
        review: _Review = _decoded(response.content, _Review)
        return review.status.allowed

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
        limits = httpx.Timeout(self._deadline_s, read=for_s + self._deadline_s)
        path, headers = kind.path(namespace), self._headers()
        try:
            async with self._http.stream(
                "GET", path, params=query, headers=headers, timeout=limits
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._token_at = float("-inf") if response.status_code == 401 else self._token_at
                    raise _refusal(response)
                yield None
                async for line in response.aiter_lines():
                    if line:
                        yield _event(line, kind)
        except httpx.TransportError as error:
            raise KubeError(f"the watch of {kind.plural} was cut ({type(error).__name__})") from None

    # ---- requests ------------------------------------------------------------

    def _headers(self) -> dict[str, str]:
        if self._server.token_file is None:
            return {"Authorization": f"Bearer {self._server.token}"} if self._server.token else {}
        if self._clock() - self._token_at >= _TOKEN_S:
            try:
                self._token = self._server.token_file.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise KubeError(
                    f"the token of the service account cannot be read: {error.strerror}"
                ) from None
            self._token_at = self._clock()
        return {"Authorization": f"Bearer {self._token}"}

    async def _ask(
        self, method: str, path: str, *, or_exists: bool = False, **options: Any
    ) -> httpx.Response:
        """Send a request until it is answered.

        ``or_exists``: a 409 after a first try that may have succeeded is an answer.
        """
        until, tries, had_401 = self._clock() + self._deadline_s, 0, False
        extra: dict[str, str] = options.pop("headers", {})
        while True:
            response: httpx.Response | None = None
            try:
                response = await self._http.request(method, path, headers=self._headers() | extra, **options)
            except httpx.TransportError as error:
                failure = KubeError(f"the API server does not answer ({type(error).__name__})")
            else:
                if response.is_success or (or_exists and tries and response.status_code == 409):
                    return response
                failure = _refusal(response)
                if response.status_code == 401 and not had_401:
                    had_401, self._token_at = True, float("-inf")
                    continue
                if response.status_code not in _RETRIED:
                    raise failure
            delay_s = self._delay_s(response, tries)
            tries += 1
            if self._clock() + delay_s > until:
                raise failure
            await self._sleep(delay_s)

    @staticmethod
    def _delay_s(response: httpx.Response | None, tries: int) -> float:
        delay_s = backoff_s(tries)
        asked = response.headers.get("Retry-After", "") if response is not None else ""
        return max(delay_s, float(asked)) if asked.isascii() and asked.isdigit() else delay_s


def backoff_s(tries: int) -> float:
    """Return the seconds to wait after ``tries`` failures: doubling, at most 5, half of it at random."""
    whole: float = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(tries, 10))
    return whole * random.uniform(0.5, 1.0)  # noqa: S311 (spreads requests, keeps no secret)


def _decoded(content: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise KubeError(f"the answer of the API server is not understood: {error}") from None


def _refusal(response: httpx.Response) -> KubeError:
    try:
        said = msgspec.json.decode(response.content, type=_Status)
    except msgspec.MsgspecError:
        said = _Status()
    kind = Expired if response.status_code == _GONE else KubeError
    text = said.message[:300] or f"status {response.status_code}"
    return kind(f"the API server refused: {text}", status=response.status_code)


def _event(line: str, kind: Resource[T]) -> WatchEvent[T]:
    event: _Event = _decoded(line.encode(), _Event)
    if event.type == "ERROR":
        status: _Status = _decoded(bytes(event.object), _Status)
        raised = Expired if status.code == _GONE else KubeError
        raise raised(f"the API server ended a watch: {status.message[:300]}", status=status.code)
    if event.type == "BOOKMARK":
        mark: Json = _decoded(bytes(event.object), dict)
        return WatchEvent("BOOKMARK", mark.get("metadata", {}).get("resourceVersion", ""), None)
    found: T = _decoded(bytes(event.object), kind.type)
    return WatchEvent(event.type, found.metadata.resource_version, found)
