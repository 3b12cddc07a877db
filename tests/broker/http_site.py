"""A broker that answers over real HTTP, with a Hub that knows a few tokens."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from jupyterhub.services.auth import HubOAuth
from tornado import httpserver, web
from tornado.netutil import bind_sockets, bind_unix_socket

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.http import metrics, routes
from jupyter_gpushare.broker.http.access import ADMIN_SCOPE, JOBS_SCOPE, Access
from jupyter_gpushare.broker.http.base import Service
from jupyter_gpushare.broker.http.base import Site as HttpSite
from jupyter_gpushare.broker.http.listener import ApiListener, Proxies
from jupyter_gpushare.broker.http.secret_files import tls_context
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.transitions import Started
from jupyter_gpushare.broker.views.overview import Overview
from jupyter_gpushare.connections import BACKLOG
from jupyter_gpushare.listener import Gate
from jupyter_gpushare.protocol import wire
from tests.broker.site import Site, spawn
from tests.waiting import PATIENCE_S

PREFIX = "/services/gpushare/"
ACCESS = "access:services!service=gpushare"
SPAWNER = "the-spawners-own-token"


def person(name: str, *scopes: str) -> dict[str, Any]:
    return {"kind": "user", "name": name, "groups": [], "admin": False, "scopes": [ACCESS, *scopes]}


TOKENS: dict[str, dict[str, Any]] = {
    "ada": person("ada", JOBS_SCOPE),
    "bo": person("bo", JOBS_SCOPE),
    "bo-reads": person("bo"),
    "root": person("root", JOBS_SCOPE, ADMIN_SCOPE),
    "ada-server": person("ada", JOBS_SCOPE, "access:servers!server=ada/"),
    "ada-two": person("ada", "access:servers!server=ada/", "access:servers!server=ada/x"),
    "bo-as-ada": person("bo", "access:servers!server=ada/"),
    "prometheus": {"kind": "service", "name": "prometheus", "scopes": [ACCESS, "read:metrics"]},
    "no-access": {"kind": "user", "name": "eve", "groups": [], "scopes": []},
}


class _HubUser(web.RequestHandler):
    """The Hub's description of the owner of a token."""

    async def get(self) -> None:
        known = self.application.settings["tokens"]
        token = self.request.headers.get("Authorization", "").partition(" ")[2]
        self.application.settings["asked"][token] += 1
        if token == "hub-is-down":
            raise web.HTTPError(503)
        if token.startswith("hub-waits"):
            await self.application.settings["goes_on"].wait()
        if token not in known:
            raise web.HTTPError(403)
        self.write(known[token])


class Http:
    """A listening broker on a site in memory, in real time."""

    def __init__(self, site: Site, proxies: Sequence[str] = ()) -> None:
        self.site = site
        self.proxies = Proxies.at(proxies)
        self.hub_goes_on = asyncio.Event()  # with the answers about tokens "hub-waits..."
        self.hub_asked: Counter[str] = Counter()  # by token
        self.tokens = dict(TOKENS)
        self.servers: list[httpserver.HTTPServer] = []

    async def open(self) -> None:
        self.broker = await self.site.start_broker(running=False)
        await self.broker.loop.observer.measure()
        hub_url = self._listen(
            httpserver.HTTPServer(
                web.Application(
                    [("/hub/api/user", _HubUser)],
                    tokens=self.tokens,
                    goes_on=self.hub_goes_on,
                    asked=self.hub_asked,
                    log_function=_silent,
                )
            )
        )
        auth = HubOAuth(
            api_url=f"{hub_url}/hub/api",
            api_token="broker",
            oauth_client_id="service-gpushare",
            base_url=PREFIX,
            hub_prefix="/hub/",
            hub_host="",
            access_scopes={ACCESS},
            cache_max_age=1,
        )
        self.service = Service(
            control=self.broker.control,
            views=self.broker.views,
            overview=Overview(self.broker.views),
            access=Access(auth, [SPAWNER], self.broker.hub, self.broker.loop.ownership),
            site=HttpSite(PREFIX, lambda: routes.describe(PREFIX), metrics.collectors(self.broker.registry)),
            gate=Gate(),
        )
        # The path of a socket has at most 107 bytes; a path in pytest's folders may be longer.
        self._folder = tempfile.TemporaryDirectory(prefix="gpushare-")
        self.application = GPUShareBroker(state_dir=self._folder.name)._application(self.service)
        self.listener = ApiListener(self.application, self.service.gate, self.proxies)
        self.url = self._listen(self.listener)
        unix = self.unix = f"{self._folder.name}/api.sock"
        self.servers[-1].add_socket(bind_unix_socket(unix, backlog=BACKLOG))
        self.by_socket = httpx.AsyncClient(
            base_url=f"http://localhost{PREFIX}api/v1/",
            transport=httpx.AsyncHTTPTransport(uds=unix),
            trust_env=False,
            timeout=PATIENCE_S,
        )
        self.api = f"{self.url}{PREFIX}api/v1"
        self.client = httpx.AsyncClient(base_url=self.api + "/", trust_env=False, timeout=PATIENCE_S)

    def listen_tls(self, folder: Path) -> str:
        """Listen with TLS too, with a certificate in ``folder``; return the URL."""
        tls = tls_context(folder / "api-certificate.pem", folder / "api-key.pem")
        server = ApiListener(self.application, self.service.gate, self.proxies, ssl_options=tls)
        return self._listen(server).replace("http:", "https:")

    def _listen(self, server: httpserver.HTTPServer) -> str:
        (socket,) = bind_sockets(0, "127.0.0.1", backlog=BACKLOG)
        port = socket.getsockname()[1]
        server.add_socket(socket)
        self.servers.append(server)
        return f"http://127.0.0.1:{port}"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def __aenter__(self) -> Http:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.client.aclose()
        await self.by_socket.aclose()
        self._folder.cleanup()
        self.service.gate.stop()
        for server in self.servers:
            server.stop()
            await server.close_all_connections()
        await self.site.close()

    def login(self, token: str) -> str:
        """Log in at the broker's page with this token; return the broker's cookie."""
        secret = self.application.settings["cookie_secret"]
        return web.create_signed_value(secret, "service-gpushare", token).decode()

    async def ask(
        self, method: str, path: str, identity: str | None = "bo", **options: Any
    ) -> httpx.Response:
        headers = {"Authorization": f"token {identity}"} if identity else {}
        headers |= options.pop("headers", {})
        if method == "GET":
            options.pop("json", None)  # a body is refused there
        client = self.by_socket if path.startswith("spawner/") else self.client
        return await client.request(method, path, headers=headers, **options)

    async def refused(
        self, method: str, path: str, identity: str | None = "bo", **options: Any
    ) -> wire.ErrorAnswer:
        """Return the error of a request that must be refused; check the form of the error."""
        response = await self.ask(method, path, identity, **options)
        assert response.status_code >= 400, response.text
        answer = msgspec.json.decode(response.content, type=wire.ErrorAnswer)
        assert answer.status == response.status_code
        assert answer.message
        assert answer.reason
        assert response.headers["Content-Type"] == "application/json"
        return answer

    async def session(self, user: str = "ada") -> LeaseRecord:
        """Start a server of ``user`` with half a GPU; return its lease."""
        await self.broker.start(spawn(user, "1/2"))
        record = self.broker.registry.by_server(user, "")
        return await self.broker.registry.advance(record, Started())

    async def submit(self, identity: str = "bo", **more: Any) -> wire.Job:
        for _ in range(20):
            response = await self.ask("POST", "jobs", identity, json={"command": ["true"], **more})
            if b"devices_unknown" not in response.content:
                break
            # On a slow machine the sample may be old, and this broker takes no sample by itself.
            await self.broker.loop.observer.measure()
        assert response.status_code == 201, response.text
        return msgspec.json.decode(response.content, type=wire.Job)


def _silent(_handler: Any) -> None:
    return None


_EXAMPLES = {"id": "abc", "job": "abc", "lease": "abc", "n": "1", "name": "nlp", "kernel": "k-1"}
_EXAMPLES |= {"action": "lend", "trace": "jobs", "process": "1-1"}


def example(path: str, **more: str) -> str:
    """Return ``path`` with its placeholders filled in; ``more`` overrides the default values."""
    return path.format_map(_EXAMPLES | more)
