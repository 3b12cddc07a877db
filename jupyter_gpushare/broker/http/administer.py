"""Routes for administrators alone."""

from __future__ import annotations

from jupyter_gpushare.broker.control import draining
from jupyter_gpushare.broker.control.administration import end_process
from jupyter_gpushare.broker.http.access import ADMIN_SCOPE
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.broker.views import trace
from jupyter_gpushare.broker.views.owners import owners
from jupyter_gpushare.protocol import wire


class DeviceDrain(Base):
    """Let a GPU (its UUID), or the ``machine``, take nothing new; delete lets it take work again."""

    async def put(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        request = self.body(wire.DrainRequest) if self.content else wire.DrainRequest()
        await draining.drain(
            self.control.registry, self.control.admission.engine, name, request.until, identity.user
        )
        self.answer(self.service.views.devices(admin=True))

    async def delete(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        await draining.undrain(self.control.registry, name, identity.user)
        self.answer(self.service.views.devices(admin=True))


class UnleasedProcess(Base):
    """End a process without a lease on a GPU; the watchdog's rules say which are left alone."""

    async def delete(self, name: str, process: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        control = self.control
        await end_process(control.registry, control.admission.devices, name, process, identity.user)
        self.answer(self.service.views.devices(admin=True))


class Owners(Base):
    """Owners of leases that are absent from the Hub, or were made anew."""

    async def get(self) -> None:
        await self.identify(ADMIN_SCOPE)
        self.answer(owners(self.control.registry))


class Owner(Base):
    """Give what belongs to an absent owner to a user of the Hub; delete fails the jobs that wait."""

    async def put(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        to = (self.body(wire.Adoption) if self.content else wire.Adoption()).to
        await self.control.ownership.adopt(name, to, identity.user)
        self.answer(owners(self.control.registry))

    async def delete(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        await self.control.ownership.end(name, identity.user)
        self.answer(owners(self.control.registry))


class Trace(Base):
    """What ran here, as a trace for the simulator: ``jobs`` or ``cells``; ``?names=1``: with names."""

    async def get(self, kind: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        self.service.limits.scans.take(identity.user)
        of_kind = trace.jobs if kind == "jobs" else trace.cells
        names = self.get_query_argument("names", "") == "1"
        self.answer(await of_kind(self.control.registry, names=names))
