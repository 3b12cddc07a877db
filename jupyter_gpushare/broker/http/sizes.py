"""The route that gives a running session another size."""

from __future__ import annotations

from jupyter_gpushare.broker.http.access import JOBS_SCOPE
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.errors import NotFound
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
