"""The routes that give a running session another size, and a running server its first GPU."""

from __future__ import annotations

from jupyter_gpushare.broker.http.access import JOBS_SCOPE
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.errors import NotAllowed, NotFound
from jupyter_gpushare.peers import socket_uid
from jupyter_gpushare.protocol import wire


class LeaseSize(Base):
    """Give my running session another size on its GPU."""

    async def put(self, lease_id: str) -> None:
        """Answer with the lease once it has its new size.

        Raises:
            NotFound: there is no such lease, or it is another user's, also for an admin.
        """
        identity = await self.identify()
        identity.require(JOBS_SCOPE)
        record = self.control.registry.get(lease_id)
        if record.lease.user != identity.user:
            raise NotFound("there is no such lease (it may have ended)")
        await self.control.admission.resizes.change(record, self.body(wire.SizeRequest))
        self.answer(self.service.views.lease(self.control.registry.get(lease_id)))


class ServerGpu(Base):
    """Give a GPU to the server that asks over the unix socket: the lease gets the uid of its process."""

    async def post(self) -> None:
        """Answer with the environment of the lease, once the server's processes may use it.

        Raises:
            NotAllowed: no running server asks with its own token, or not over the unix socket.
        """
        identity = await self.identify()
        identity.require(JOBS_SCOPE)
        uid = socket_uid(self.stream.socket)
        if identity.server is None or uid is None:
            raise NotAllowed("a server asks for its GPU itself: choose Get a GPU in JupyterLab")
        gain = self.body(wire.GpuGain)
        groups = await self.service.access.groups(identity, fresh=True)
        options = wire.GpuRequest(project=gain.project)
        request = wire.SpawnRequest(
            user=identity.user, server=identity.server, groups=list(groups), uid=uid, options=options
        )
        self.answer(await self.control.admission.gain(request, gain))
