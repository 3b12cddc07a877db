"""The contract of `Hub` on a `Site`, for one broker.

It imitates JupyterHub's REST API: a server that is requested twice starts once, and a starting
server cannot be stopped (jupyterhub/apihandlers/users.py: "is pending spawn").  A request to start
a server is answered when it has started, or after `SLOW_SPAWN_S` (jupyterhub/handlers/base.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jupyter_gpushare.backends.base import Hub, HubError, HubServer, HubUser, ServerKey

if TYPE_CHECKING:
    from tests.broker.brokers import Broker
    from tests.broker.site import Site


# JupyterHub's `slow_spawn_timeout`.
SLOW_SPAWN_S = 10.0


class SiteHub(Hub):
    """The servers of a site; each change is two steps of the broker."""

    def __init__(self, site: Site, broker: Broker) -> None:
        self.site = site
        self.broker = broker

    async def start_server(self, key: ServerKey, shown: str, ticket: str) -> None:
        self.site.shown[key] = shown
        await self.broker.devices.effect("start_server", key.server)
        if await self.user(key.user) is None:
            raise HubError(f"the Hub did not start {key.server}: no such user", unknown_user=True)
        if key not in self.site.servers:
            self.site.servers[key] = "spawn"
            self.site.later(self.site.spawn_job(key, ticket))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLOW_SPAWN_S):
                while self.site.servers.get(key) == "spawn":
                    await asyncio.sleep(0.1)
        await self.broker.step()

    async def stop_server(self, key: ServerKey, *, forget: bool = True) -> None:
        assert forget == key.server.startswith("j"), "servers of users are not deleted"
        if not forget and self.site.servers.get(key) != "spawn":
            self.site.later(self.site.end_session(key.user, key.server))
        await self.broker.devices.effect("stop_server", key.server)
        state = self.site.servers.get(key)
        if state == "spawn":
            raise HubError(f"{key.server} is pending spawn")
        for run in self.site.runs:
            if run.user == key.user and f"j{run.job.id}-{run.job.attempt}" == key.server:
                run.told_to_stop = True
        await self.broker.step()

    async def servers(self) -> Mapping[ServerKey, HubServer]:
        if self.broker.dead.is_set():
            await asyncio.Event().wait()
        return {key: self.site.active.get(key, HubServer()) for key in self.site.servers}

    async def services(self) -> Mapping[str, Sequence[str]]:
        return self.site.services

    async def has_server(self, key: ServerKey) -> bool:
        return key in await self.servers()

    async def user(self, name: str) -> HubUser | None:
        return next((user for user in await self.users() if user.name == name), None)

    async def users(self) -> list[HubUser]:
        if self.broker.dead.is_set():
            await asyncio.Event().wait()
        names = self.site.groups.keys() - self.site.deleted
        return [HubUser(name, self.site.made_at(name), self.site.groups[name]) for name in sorted(names)]

    async def server_url(self, key: ServerKey) -> str:
        here = f"https://{key.user}.hub.test/user/{key.user}/{key.server}/"
        return here if key in self.site.servers else ""

    async def close(self) -> None:
        return None
