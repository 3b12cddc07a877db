"""Identities of callers, from the Hub's answers about their tokens.

| caller            | token                                                                 |
|-------------------|-----------------------------------------------------------------------|
| user              | a Hub token, or for reads the service's login cookie                  |
| server of a user  | its token, the only one with ``access:servers!server=USER/NAME``      |
| spawner           | a line of `GPUShareBroker.spawner_token_file`                         |

The Hub decides on groups and on the right to administer.  The broker reads groups with
its own token and caches them for `_GROUPS_S`; writes read them again.

A token belongs to one user forever, even if the user is renamed.  The Hub's answer about
a token does not tell when the user was created, so the broker asks for that once per
token (`control.ownership`).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jupyterhub.services.auth import HubOAuth

from jupyter_gpushare.backends.base import Hub, HubError, HubUser, ServerKey
from jupyter_gpushare.broker.control.ownership import Ownership
from jupyter_gpushare.errors import BrokerUnavailable, Conflict, HelperError, NotAllowed
from jupyter_gpushare.wall_clock import is_same

JOBS_SCOPE = "custom:gpushare:jobs"
ADMIN_SCOPE = "custom:gpushare:admin"

_GROUPS_S = 30.0
_MAX_CACHED = 10_000
_SERVER_SCOPE = "access:servers!server="


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller of a request, as the Hub knows it."""

    user: str  # `records.Owner.user`: the name, unless another user has it now
    scopes: frozenset[str]
    is_service: bool = False
    created: str = ""  # when the Hub created the user

    @property
    def admin(self) -> bool:
        """Whether the token has the Hub's scope for admins of this service."""
        return ADMIN_SCOPE in self.scopes

    @property
    def server(self) -> str | None:
        """Name of the server that the token was issued for, or None for other tokens."""
        names = {s.removeprefix(_SERVER_SCOPE) for s in self.scopes if s.startswith(_SERVER_SCOPE)}
        user, slash, server = next(iter(names)).partition("/") if len(names) == 1 else ("", "", "")
        return server if slash and user == self.user else None

    @property
    def holder(self) -> str:
        """The holder of connections and requests; users and services never share one."""
        return self.user if self.is_service else f"user {self.user}"

    def require(self, scope: str) -> None:
        """Check that the token has ``scope``.

        Raises:
            NotAllowed: the token lacks it.
        """
        if scope not in self.scopes:
            raise NotAllowed("your token lacks the scope %1: ask the admin of this Hub", scope)


class Access:
    """Identities, groups and server addresses from the Hub, with short caches."""

    def __init__(
        self, hub_auth: HubOAuth, spawner_tokens: Sequence[str], hub: Hub, ownership: Ownership
    ) -> None:
        self.hub_auth = hub_auth
        self.spawner_tokens = tuple(spawner_tokens)  # the spawner may use any of them
        self._hub = hub
        self._ownership = ownership
        # When a token's user was created, by the token's SHA-256: the Hub reuses ids of deleted tokens.
        self._created: dict[bytes, str] = {}
        self._groups: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = {}

    async def identity(self, model: dict[str, Any] | None, token: str | None) -> Identity:
        """Return the identity for ``token`` and the Hub's ``model`` of it.

        Raises:
            NotAllowed: the token is invalid or lacks access to this service, or the name has a slash.
            BrokerUnavailable: the Hub does not answer.
        """
        if model is None or token is None:
            raise NotAllowed(
                "this needs a valid token of the Hub (its Token page makes one) or a login", reason="login"
            )
        scopes = frozenset(model.get("scopes", ()))
        if not self.hub_auth.check_scopes(self.hub_auth.access_scopes, model):
            raise NotAllowed("your token has no access to the GPU service (access:services!service=...)")
        name = str(model["name"])
        if model.get("kind") == "service":  # a service may have the name of a user
            return Identity(user=f"service/{name}", scopes=scopes, is_service=True)
        created = self._created.get(key := hashlib.sha256(token.encode()).digest())
        user = None if created is None else self._ownership.find(name, created)
        if created is None or user is None:
            hub_user = await self._user(name)
            if hub_user is None:
                raise NotAllowed("the Hub has no such user any more: log in again", reason="login")
            await self._ownership.meet(name, hub_user.created)
            if len(self._created) >= _MAX_CACHED:
                self._created.clear()
            created = self._created.setdefault(key, hub_user.created)
            user = self._ownership.find(name, created) or name
        return Identity(user=user, scopes=scopes, created=created)

    def knows(self, token: str, session: str = "") -> bool:
        """Return whether the Hub's answer about a token is cached, so that the Hub is not asked."""
        # The key of `HubAuth.user_for_token`.
        key = f"token:{session}:{hashlib.sha256(token.encode('utf8', 'replace')).hexdigest()}"
        return key in self.hub_auth.cache

    async def _user(self, name: str) -> HubUser | None:
        try:
            return await self._hub.user(name)
        except HubError as error:
            raise BrokerUnavailable(str(error)) from None

    def is_spawner(self, authorization: str) -> bool:
        """Return whether the header holds the spawner's token (compared in constant time)."""
        offered = authorization.partition(" ")[2].encode()
        return any(hmac.compare_digest(offered, token.encode()) for token in self.spawner_tokens)

    async def groups(self, identity: Identity, *, fresh: bool = False) -> tuple[str, ...]:
        """Return the Hub groups of a user, up to `_GROUPS_S` old unless ``fresh``.

        A service has none, and neither has a user whose name another user has now.

        Raises:
            BrokerUnavailable: the Hub does not answer.
        """
        if identity.is_service:
            return ()
        cached = self._groups.get(key := (identity.user, identity.created))
        if not fresh and cached is not None and time.monotonic() - cached[0] < _GROUPS_S:
            return cached[1]
        user = await self._user(identity.user)
        groups = user.groups if user is not None and is_same(user.created, identity.created) else ()
        if len(self._groups) >= _MAX_CACHED:
            self._groups.clear()
        self._groups[key] = (time.monotonic(), groups)
        return groups

    async def stop_server(self, key: ServerKey) -> None:
        """Stop a server of a user; it stays in the user's list of servers.

        Raises:
            BrokerUnavailable: the Hub refuses, for example while the server starts, or the Hub or the
                device helper does not answer.
        """
        try:
            await self._hub.stop_server(key, forget=False)
        except (HubError, HelperError) as error:
            raise BrokerUnavailable(str(error)) from None

    async def server_url(self, key: ServerKey) -> str:
        """Return the public address of a server, with a trailing slash.

        Raises:
            Conflict: the server does not run.
            BrokerUnavailable: the Hub does not answer.
        """
        try:
            url = await self._hub.server_url(key)
        except HubError as error:
            raise BrokerUnavailable(str(error)) from None
        if not url:
            raise Conflict("this server does not run any more", reason="not_running")
        return url
