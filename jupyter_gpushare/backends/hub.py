"""The broker's calls to JupyterHub's REST API.

They need the scopes ``list:users read:users read:groups read:servers servers
delete:servers``, and ``list:services read:services`` to find idle cullers.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from jupyter_gpushare.backends.base import Hub, HubError, HubServer, HubUser, ServerKey
from jupyter_gpushare.protocol.wire import TICKET_OPTION
from jupyter_gpushare.wall_clock import exact

T = TypeVar("T")

# Users per page of the list; the Hub may give fewer (`c.JupyterHub.api_page_max_limit`).
_PAGE = 200
# With this media type the Hub's answer says where its next page begins.
_PAGINATED = "application/jupyterhub-pagination+json"
_MAX_PAGES = 500
# 401, 403: token not accepted or without a scope; 429: too many spawns; 503: the Hub starts or stops.
_NOT_NOW = (401, 403, 429, 503)
# First major version with display names of named servers.
_SHOWS_NAMES = 6
# Messages of the Hub (jupyterhub/apihandlers/users.py, jupyterhub/scopes.py).
_NAMED_SERVERS_OFF = "Named servers are not enabled"
_LACKS_SCOPE = "not authorized with current scopes"
_UNKNOWN_CALLER = "invalid credentials"


class _Server(msgspec.Struct):
    name: str
    ready: bool = False
    pending: str | None = None
    stopped: bool = False
    last_activity: datetime | None = None
    started: datetime | None = None
    url: str = ""
    full_url: str | None = None  # with a host; always set if each user has a subdomain

    @property
    def seen(self) -> HubServer:
        return HubServer(exact(self.last_activity), exact(self.started), self.pending == "stop")


class _Service(msgspec.Struct):
    command: list[str] | str | None = None


class _Next(msgspec.Struct):
    offset: int


class _Pagination(msgspec.Struct):
    next: _Next | None = None


class _User(msgspec.Struct):
    name: str
    created: datetime | None = None
    groups: list[str] = []
    servers: dict[str, _Server] = {}

    @property
    def seen(self) -> HubUser:
        return HubUser(self.name, exact(self.created), tuple(self.groups))


class _Page(msgspec.Struct):
    items: list[_User]
    pagination: _Pagination = msgspec.field(name="_pagination")


def _decoded(response: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.MsgspecError as error:
        raise HubError(f"the Hub's answer is not understood: {error}") from None


def _remedy(status: int, message: str) -> str:
    """Return what the administrator must set if the Hub refuses the broker itself; else empty."""
    if _NAMED_SERVERS_OFF in message:
        return "set c.JupyterHub.allow_named_servers = True: a training job is a named server"
    if status in (401, 403) and _LACKS_SCOPE in message:
        return (
            "give the broker's role in c.JupyterHub.load_roles the scopes list:users, read:users, "
            "read:groups, read:servers, servers and delete:servers"
        )
    if 300 <= status < 400:  # the Hub has its API below its base_url and redirects other paths
        return (
            "the path of JUPYTERHUB_API_URL of the broker (broker.env) is the Hub's base_url and hub/api, "
            "such as http://127.0.0.1:8081/jupyter/hub/api"
        )
    # A 403 may also come from a hook, or from the broker as its answer to the spawner.
    if status == 401 or (status == 403 and _UNKNOWN_CALLER in message):
        return (
            "JUPYTERHUB_API_TOKEN of the broker (broker.env) and api_token of the service gpushare in the "
            "Hub's configuration must be the same token; restart both after a change"
        )
    return ""


class HubClient(Hub):
    """JupyterHub's REST API, called as the broker's service."""

    def __init__(
        self, api_url: str, token: str, *, timeout_s: float = 20.0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._http = httpx.AsyncClient(
            base_url=api_url.rstrip("/") + "/",
            headers={"Authorization": f"token {token}"},
            timeout=timeout_s,
            trust_env=False,
            verify=tls or True,
        )
        # The last pages of users, by state and offset, with the ETag of the answer.
        self._pages: dict[tuple[str, int], tuple[str, _Page]] = {}
        self._shows_names = False  # by the Hub's last answer; the Hub may be upgraded at any time

    async def _ask(self, method: str, path: str, **options: object) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **options)  # type: ignore[arg-type]
        except httpx.TransportError as error:
            raise HubError(f"the Hub does not answer ({type(error).__name__})") from None
        major = response.headers.get("X-JupyterHub-Version", "").partition(".")[0]
        self._shows_names = major.isdecimal() and int(major) >= _SHOWS_NAMES
        return response

    @staticmethod
    def _message(response: httpx.Response) -> str:
        try:
            return str(msgspec.json.decode(response.content)["message"])
        except (msgspec.MsgspecError, KeyError, TypeError):
            return f"status {response.status_code}"

    def _refusal(self, failure: str, response: httpx.Response) -> HubError:
        message = self._message(response)
        return HubError(f"{failure}: {message}", remedy=_remedy(response.status_code, message))

    async def start_server(self, key: ServerKey, shown: str, ticket: str) -> None:
        """Ask the Hub to start a named server.

        Raises:
            HubError: ``unknown_user``; ``not_now`` at a limit of the Hub or of the
                user's named servers, or when the Hub does not accept the token.
        """
        path = f"users/{quote(key.user, safe='')}/servers/{quote(key.server, safe='')}"
        options = {TICKET_OPTION: ticket}
        # An older Hub takes the whole body as options of the spawner.
        body = {"display_name": shown, "user_options": options} if self._shows_names else options
        response = await self._ask("POST", path, json=body)
        if response.status_code in (201, 202):
            return
        message = self._message(response)
        if response.status_code == 400 and "already running" in message:
            return
        is_off = response.status_code == 400 and _NAMED_SERVERS_OFF in message
        raise HubError(
            f"the Hub did not start {key.server}: {message}",
            unknown_user=response.status_code == 404,
            not_now=response.status_code in _NOT_NOW or "maximum" in message or is_off,
            remedy=_remedy(response.status_code, message),
        )

    async def stop_server(self, key: ServerKey, *, forget: bool = True) -> None:
        """Ask the Hub to stop a server, and to forget a named one.

        Raises:
            HubError: the Hub refused, or is busy with this server (ask again).
        """
        path = f"users/{quote(key.user, safe='')}/servers/{quote(key.server, safe='')}"
        response = await self._ask("DELETE", path, json={"remove": forget})
        if response.status_code not in (202, 204, 404):
            raise self._refusal(f"the Hub did not stop {key.server}", response)

    async def servers(self) -> Mapping[ServerKey, HubServer]:
        """Return all servers that are not stopped.

        Raises:
            HubError: the list could not be read completely.
        """
        users = [user async for user in self._list("active")]
        return {ServerKey(u.name, s.name): s.seen for u in users for s in u.servers.values() if not s.stopped}

    async def services(self) -> Mapping[str, Sequence[str]]:
        """Return the commands of the services that the Hub runs, by name.

        Raises:
            HubError: the list could not be read.
        """
        response = await self._ask("GET", "services")
        if response.status_code != 200:
            raise self._refusal("the Hub did not list its services", response)
        found = _decoded(response, dict[str, _Service])
        return {name: each.command for name, each in found.items() if isinstance(each.command, list)}

    async def users(self) -> list[HubUser]:
        """Return all users.

        Raises:
            HubError: the list could not be read completely.
        """
        return [user.seen async for user in self._list("")]

    async def _list(self, state: str) -> AsyncIterator[_User]:
        offset = 0
        for _ in range(_MAX_PAGES):
            page = await self._page(state, offset)
            for user in page.items:
                yield user
            if page.pagination.next is None:
                return
            offset = page.pagination.next.offset
        raise HubError("the Hub has more users than the broker reads")

    async def _page(self, state: str, offset: int) -> _Page:
        """Return a page of the users; with ``state`` "active" only of users with servers.

        The Hub answers 304 if nothing has changed since the last request, and logs that for debugging only.

        Raises:
            HubError: refused, or no answer.
        """
        tag, cached = self._pages.get((state, offset), ("", None))
        response = await self._ask(
            "GET",
            "users",
            params={"state": state, "offset": offset, "limit": _PAGE},
            headers={"Accept": _PAGINATED} | ({"If-None-Match": tag} if tag else {}),
        )
        if response.status_code == 304 and cached is not None:
            return cached
        if response.status_code != 200:
            raise self._refusal("the Hub did not list its servers", response)
        page = _decoded(response, _Page)
        self._pages[state, offset] = (response.headers.get("Etag", ""), page)
        return page

    async def has_server(self, key: ServerKey) -> bool:
        """Return whether a server starts, runs or stops.

        Raises:
            HubError: the Hub did not answer.
        """
        found = await self._user(key.user)
        server = found.servers.get(key.server) if found else None
        return server is not None and not server.stopped

    async def user(self, name: str) -> HubUser | None:
        """Return a user, or None if the Hub has no user of this name.

        Raises:
            HubError: no answer.
        """
        found = await self._user(name)
        return found.seen if found else None

    async def server_url(self, key: ServerKey) -> str:
        """Return the URL of a server with a trailing slash; empty if it does not run.

        Raises:
            HubError: no answer.
        """
        found = await self._user(key.user)
        server = found.servers.get(key.server) if found else None
        return (server.full_url or server.url) if server else ""

    async def _user(self, name: str) -> _User | None:
        response = await self._ask("GET", f"users/{quote(name, safe='')}")
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise self._refusal(f"the Hub did not answer about {name}", response)
        return _decoded(response, _User)

    async def close(self) -> None:
        await self._http.aclose()
