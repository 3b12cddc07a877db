"""Identities of callers, from the Hub's answer about their tokens.

| caller            | token                                                                 |
|-------------------|-----------------------------------------------------------------------|
| user              | a Hub token, or for reads the service's login cookie                  |
| server of a user  | its token, the only one with ``access:servers!server=USER/NAME``      |
| spawner           | a line of `GPUShareBroker.spawner_token_file`                         |

The Hub decides on groups and on the right to administer.  Groups are read with
the broker's own token and cached for `_GROUPS_S`; writes read them anew.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jupyterhub.services.auth import HubOAuth

from jupyter_gpushare.backends.base import Hub, HubError, ServerKey
from jupyter_gpushare.errors import BrokerUnavailable, Conflict, HelperError, NotAllowed

JOBS_SCOPE = "custom:gpushare:jobs"
ADMIN_SCOPE = "custom:gpushare:admin"

_GROUPS_S = 30.0
_MAX_CACHED = 10_000
_SERVER_SCOPE = "access:servers!server="


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller of a request, as the Hub knows it."""

    user: str
    scopes: frozenset[str]
    is_service: bool = False

    @property
    def admin(self) -> bool:
        """Whether the token has the Hub's scope for admins of this service."""
        return ADMIN_SCOPE in self.scopes

    @property
    def server(self) -> str | None:
        """Name of the server that the token was issued for; None for other tokens."""
        names = {s.removeprefix(_SERVER_SCOPE) for s in self.scopes if s.startswith(_SERVER_SCOPE)}
        user, slash, server = next(iter(names)).partition("/") if len(names) == 1 else ("", "", "")
        return server if slash and user == self.user else None

    def require(self, scope: str) -> None:
        """Return if the token has ``scope``.

        Raises:
            NotAllowed: it has not.
        """
        if scope not in self.scopes:
            raise NotAllowed("your token lacks the scope %1: ask the admin of this Hub", scope)


class Access:
    """Identities, groups and server addresses from the Hub, with short caches."""

    def __init__(self, hub_auth: HubOAuth, spawner_tokens: Sequence[str], hub: Hub) -> None:
        self.hub_auth = hub_auth
        self.spawner_tokens = tuple(spawner_tokens)  # any of them is the spawner's
        self._hub = hub
        self._groups: dict[str, tuple[float, tuple[str, ...]]] = {}

    def identity(self, model: dict[str, Any] | None) -> Identity:
        """Return the identity for the Hub's model of a token.

        Raises:
            NotAllowed: no valid token, or one without access to this service.
        """
        if model is None:
            raise NotAllowed(
                "this needs a valid token of the Hub (its Token page makes one) or a login", reason="login"
            )
        scopes = frozenset(model.get("scopes", ()))
        if not self.hub_auth.check_scopes(self.hub_auth.access_scopes, model):
            raise NotAllowed("your token has no access to the GPU service (access:services!service=...)")
        return Identity(user=model["name"], scopes=scopes, is_service=model.get("kind") == "service")

    def is_spawner(self, authorization: str) -> bool:
        """Return whether the header holds the spawner's token (compared in constant time)."""
        given = authorization.partition(" ")[2].encode()
        return any(hmac.compare_digest(given, token.encode()) for token in self.spawner_tokens)

    async def groups(self, user: str, *, fresh: bool = False) -> tuple[str, ...]:
        """Return the Hub groups of a user, of the last `_GROUPS_S` seconds unless ``fresh``.

        Raises:
            BrokerUnavailable: the Hub does not answer.
        """
        known = self._groups.get(user)
        if not fresh and known is not None and time.monotonic() - known[0] < _GROUPS_S:
            return known[1]
        try:
            groups = await self._hub.groups(user)
        except HubError as error:
            raise BrokerUnavailable(str(error)) from None
        if len(self._groups) >= _MAX_CACHED:
            self._groups.clear()
        self._groups[user] = (time.monotonic(), groups)
        return groups

    async def stop_server(self, key: ServerKey) -> None:
        """Stop a server of a user, which stays in the user's list of servers.

        Raises:
            BrokerUnavailable: the Hub refuses, for example while the server starts, or it or the device
                helper does not answer.
        """
        try:
            await self._hub.stop_server(key, forget=False)
        except (HubError, HelperError) as error:
            raise BrokerUnavailable(str(error)) from None

    async def server_url(self, key: ServerKey) -> str:
        """Return the public address of a server, with a trailing slash.

        Raises:
            Conflict: it does not run.
            BrokerUnavailable: the Hub does not answer.
        """
        try:
            url = await self._hub.server_url(key)
        except HubError as error:
            raise BrokerUnavailable(str(error)) from None
        if not url:
            raise Conflict("this server does not run any more", reason="not_running")
        return url
