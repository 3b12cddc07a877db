"""The routes that give a running session another size, and a running server its first GPU."""

from __future__ import annotations

from jupyter_gpushare.broker.http.access import JOBS_SCOPE
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.errors import Conflict, NotAllowed
from jupyter_gpushare.peers import socket_uid
from jupyter_gpushare.protocol import wire


class SizeChange(Base):
    """Base of both routes."""

    async def change(
        self, lease_id: str, request: wire.SizeRequest, *, by_server: bool = False
    ) -> wire.SpawnGrant | None:
        """Return the grant of a server that asks for its first GPU.

        Raises:
            NotAllowed: ``by_server``, and no running server asks with its own token over the unix socket.
        """
        identity = await self.identify(JOBS_SCOPE)
        uid, server = socket_uid(self.stream.socket), None
        if identity.server is not None and uid is not None:
            is_new = lease_id not in self.control.registry.leases
            server = wire.SpawnRequest(
                user=identity.user,
                server=identity.server,
                groups=list(await self.service.access.groups(identity, fresh=True)) if is_new else [],
                uid=uid,
                options=wire.GpuRequest(project=request.project),
            )
        elif by_server:
            raise NotAllowed("a server asks for its GPU itself: choose Get a GPU in JupyterLab")
        return await self.control.admission.change_size(identity.user, lease_id, request, server)


class LeaseSize(SizeChange):
    """Give my session another size on its GPU, or its first GPU to the server that asks.

    A server without a GPU asks with the lease that its environment names, over the unix socket: the lease
    gets the uid of its process.
    """

    async def put(self, lease_id: str) -> None:
        """Answer with the lease once its processes may use it.

        Raises:
            NotFound: there is no such lease, or it is another user's, also for an admin.
        """
        grant = await self.change(lease_id, self.body(wire.SizeRequest))
        lease = self.service.views.lease(self.control.registry.get(lease_id))
        self.answer(wire.SizedLease.of(lease, env=grant.env if grant else {}))


class ServerGpu(SizeChange):
    """As `PUT leases/{id}/size` of the server that asks, for its first GPU."""

    async def post(self) -> None:
        """Answer with the environment of the lease, once the server's processes may use it.

        Raises:
            Conflict: the server has a GPU.
        """
        identity, request = await self.identify(JOBS_SCOPE), self.body(wire.GpuGain)
        lease_id = request.lease.partition("-")[0]
        record = self.control.registry.leases.get(lease_id)
        if record and record.lease.user == identity.user and record.lease.size != request.size():
            raise Conflict("this server has a GPU: change its size", reason="has_gpu")
        self.answer(await self.change(lease_id, request, by_server=True))
