"""An API server for tests, over HTTP: the objects of `Store`, with tokens, rights, watches and faults."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tornado import web
from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.netutil import bind_sockets

from jupyter_gpushare.kube.cluster.api_server import ApiServer as Address
from tests.kube.kai_model import Kai
from tests.kube.kubeconfig import write_kubeconfig
from tests.kube.rbac import Ask, Rights
from tests.kube.store import KINDS, Happened, Json, Refused, Store, matches

_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


@dataclass
class Faults:
    """The faults that come next."""

    frozen: asyncio.Event = field(default_factory=asyncio.Event)  # set: answers
    delay_s: float = 0.0
    answers: list[tuple[int, dict[str, str]]] = field(
        default_factory=list
    )  # given instead of the next answers
    answers_to: dict[str, int] = field(default_factory=dict)  # status of every answer to a method
    lose_answers: int = 0  # requests that are carried out and not answered

    def __post_init__(self) -> None:
        self.frozen.set()


@dataclass
class ApiServer:
    store: Store
    url: str
    faults: Faults
    rights: Rights | None = None
    watches: set[Watch] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path

    def __post_init__(self) -> None:
        self.kai = Kai(self.store)
        self._loop = asyncio.get_running_loop()

    def address(self) -> Address:
        """Return the address of the server."""
        token = next(iter(self.rights.tokens)) if self.rights else ""
        return Address(url=self.url, token=token)

    def kubeconfig(self, folder: Path, token: str = "t") -> Path:
        """Write a kubeconfig file for the server; return its path."""
        return write_kubeconfig(folder, self.url, token)

    def freeze(self) -> None:
        """Send no answers and no events until `thaw`."""
        self.faults.frozen.clear()

    def thaw(self) -> None:
        """Send answers again, also for requests that came meanwhile."""
        self._loop.call_soon_threadsafe(self.faults.frozen.set)

    def cut_watches(self) -> None:
        """Close the connections of all open watches."""
        for watch in list(self.watches):
            watch.cut()


class Watch:
    """One open watch."""

    def __init__(self, plural: str, namespace: str, selector: str) -> None:
        self.queue: asyncio.Queue[Happened | None] = asyncio.Queue()
        self._plural, self._namespace, self._selector = plural, namespace, selector
        self.was_cut = False

    def wants(self, event: Happened) -> bool:
        place = event.object["metadata"].get("namespace", "")
        fits = not self._namespace or place == self._namespace
        return event.plural == self._plural and fits and matches(self._selector, event.object)

    def hear(self, event: Happened) -> None:
        if self.wants(event):
            self.queue.put_nowait(event)

    def cut(self) -> None:
        self.was_cut = True
        self.queue.put_nowait(None)


class Handler(web.RequestHandler):
    def initialize(self, server: ApiServer) -> None:
        self.server = server

    async def prepare(self) -> None:
        faults = self.server.faults
        await faults.frozen.wait()
        if faults.delay_s:
            await asyncio.sleep(faults.delay_s)
        self.server.requests.append((self.request.method or "", self.request.path))
        if status := faults.answers_to.get(self.request.method or ""):
            self.refuse(Refused(status, "Injected", f"status {status}, as the test says"))
        elif faults.answers:
            status, headers = faults.answers.pop(0)
            for name, value in headers.items():
                self.set_header(name, value)
            self.refuse(Refused(status, "Injected", f"status {status}, as the test says"))

    def refuse(self, refused: Refused) -> None:
        self.set_status(refused.status)
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": refused.status}
        self.finish(body | {"reason": refused.reason, "message": str(refused)})

    def answer(self, body: Json, status: int = 200) -> None:
        if self.server.faults.lose_answers:
            self.server.faults.lose_answers -= 1
            self.request.connection.stream.close()  # type: ignore[attr-defined]
            return
        self.set_status(status)
        self.finish(body)

    def _place(self, group: str, version: str, rest: str) -> tuple[str, str, str, str]:
        """Return plural, namespace, name and subresource of a path."""
        parts = [part for part in rest.split("/") if part]
        namespace = parts[1] if parts[:1] == ["namespaces"] and len(parts) > 2 else ""
        plural, name, sub = (*(parts[2:] if namespace else parts), "", "", "")[:3]
        kind = KINDS.get((group, version, plural))
        if kind is None or (kind[0] and not namespace and name):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return plural, namespace, name, sub

    def _check(self, verb: str, group: str, plural: str, sub: str, namespace: str) -> None:
        rights = self.server.rights
        if rights is None:
            return
        token = self.request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in rights.tokens:
            raise Refused(401, "Unauthorized", "Unauthorized")
        ask = Ask(verb, group, f"{plural}/{sub}" if sub else plural, namespace)
        if not rights.allows(token, ask):
            account = ":".join(rights.tokens[token])
            raise Refused(403, "Forbidden", f'{account} cannot {verb} resource "{ask.resource}"')

    async def get(self, group: str | None, version: str, rest: str) -> None:
        try:
            plural, namespace, name, sub = self._place(group or "", version, rest)
            is_watch = self.get_argument("watch", "").lower() in ("1", "true")
            verb = "get" if name else "watch" if is_watch else "list"
            self._check(verb, group or "", plural, sub, namespace)
            if name:
                self.answer(self.server.store.get(plural, namespace, name))
            elif is_watch:
                await self._watch(plural, namespace)
            else:
                self.answer(self._list(plural, namespace))
        except Refused as refused:
            self.refuse(refused)

    def _list(self, plural: str, namespace: str) -> Json:
        store, selector = self.server.store, self.get_argument("labelSelector", "")
        found = [obj for obj in store.all(plural, namespace) if matches(selector, obj)]
        limit, begun, version = int(self.get_argument("limit", "0")), 0, store.version
        if token := self.get_argument("continue", ""):
            version, begun = json.loads(base64.b64decode(token))
            store.since(version)  # refused where it is compacted
        page = found[begun : begun + limit] if limit else found[begun:]
        meta: Json = {"resourceVersion": str(version)}
        if begun + len(page) < len(found):
            meta["continue"] = base64.b64encode(json.dumps([version, begun + len(page)]).encode()).decode()
        return {"kind": "List", "apiVersion": "v1", "metadata": meta, "items": page}

    async def _watch(self, plural: str, namespace: str) -> None:
        store = self.server.store
        missed = store.since(int(self.get_argument("resourceVersion", "0") or 0))
        watch = Watch(plural, namespace, self.get_argument("labelSelector", ""))
        for event in missed:
            watch.hear(event)
        store.listeners.append(watch.hear)
        self.server.watches.add(watch)
        until = asyncio.get_running_loop().time() + float(self.get_argument("timeoutSeconds", "30"))
        try:
            await self.flush()
            # The bookmark confirms that nothing is missing, so all events go out before it.
            while (left := until - asyncio.get_running_loop().time()) > 0 or not watch.queue.empty():
                try:
                    event = await asyncio.wait_for(watch.queue.get(), max(left, 0.01))
                except TimeoutError:
                    continue
                if event is None:
                    self.request.connection.stream.close()  # type: ignore[attr-defined]
                    return
                await self.server.faults.frozen.wait()
                self.write(json.dumps({"type": event.type, "object": event.object}) + "\n")
                await self.flush()
            if self.get_argument("allowWatchBookmarks", "") in ("1", "true"):
                mark = {"kind": KINDS_BY_PLURAL[plural], "metadata": {"resourceVersion": str(store.version)}}
                self.write(json.dumps({"type": "BOOKMARK", "object": mark}) + "\n")
            await self.finish()
        except StreamClosedError:
            pass
        finally:
            store.listeners.remove(watch.hear)
            self.server.watches.discard(watch)

    def _review(self) -> None:
        """Answer whether an account has a right; every account may query its own."""
        asked = json.loads(self.request.body)["spec"]["resourceAttributes"]
        rights, token = self.server.rights, self.request.headers.get("Authorization", "")[len("Bearer ") :]
        ask = Ask(asked["verb"], asked["group"], asked["resource"], asked["namespace"])
        allowed = rights is None or rights.would_allow(token, ask)
        meta = {"creationTimestamp": None}
        self.answer({"metadata": meta, "spec": {}, "status": {"allowed": allowed}}, 201)

    async def _change(self, group: str | None, version: str, rest: str) -> None:
        method = self.request.method or ""
        if method == "POST" and rest == "selfsubjectaccessreviews":
            self._review()
            return
        try:
            plural, namespace, name, sub = self._place(group or "", version, rest)
            self._check(_VERBS[method], group or "", plural, sub, namespace)
            body: Json = json.loads(self.request.body or b"{}")
            store = self.server.store
            if method == "POST" and sub == "binding":
                self.answer(store.bind(namespace, name, body["target"]["name"]), 201)
            elif method == "POST":
                self.answer(store.create(plural, namespace, body), 201)
            elif method == "PATCH":
                if self.request.headers.get("Content-Type") != "application/merge-patch+json":
                    raise Refused(415, "UnsupportedMediaType", "only merge patches are understood")
                self.answer(store.patch(plural, namespace, name, body, part=sub))
            elif method == "PUT":
                self.answer(store.update(plural, namespace, name, lambda _: body))
            else:
                grace, wanted = body.get("gracePeriodSeconds"), body.get("preconditions", {})
                version = wanted.get("resourceVersion", "")
                self.answer(store.delete(plural, namespace, name, grace_s=grace, version=version))
        except Refused as refused:
            self.refuse(refused)

    post = patch = put = delete = _change  # type: ignore[assignment]


KINDS_BY_PLURAL = {plural: kind for (_, _, plural), (_, kind) in KINDS.items()}


@asynccontextmanager
async def api_server(rights: Rights | None = None) -> AsyncIterator[ApiServer]:
    """Yield an API server on a free port, in this process."""
    (socket, *others) = bind_sockets(0, "127.0.0.1")
    assert not others
    server = ApiServer(Store(), f"http://127.0.0.1:{socket.getsockname()[1]}", Faults(), rights)
    path = r"/(?:apis/([^/]+)|api)/(v[^/]+)/(.*)"
    http = HTTPServer(web.Application([(path, Handler, {"server": server})], log_function=lambda _: None))
    http.add_sockets([socket])
    try:
        yield server
    finally:
        server.faults.frozen.set()
        for watch in list(server.watches):
            watch.cut()
        http.stop()
        await http.close_all_connections()
