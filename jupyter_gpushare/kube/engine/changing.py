"""Bring the seats of the cluster to those that leases need, one change at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from jupyter_gpushare.core.model import Cluster
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.seats import STALE_S, KubeSeats
from jupyter_gpushare.kube.engine.following import Following
from jupyter_gpushare.kube.engine.starting import ROUND_S
from jupyter_gpushare.kube.rules.follow import Change, Create, reconcile

log = logging.getLogger("gpushare.broker")

# Time between two attempts to take over the seats of an older broker.
_TAKE_OVER_S = 1.0


class Changing:
    """Creates, retargets and deletes seats for the last snapshot that `settle` got (``cluster``).

    ``failure`` is the last error of a change; empty if there is none.
    """

    def __init__(self, seats: KubeSeats, following: Following, clock: Callable[[], float]) -> None:
        self._seats = seats
        self._following = following
        self._clock = clock
        self.cluster: Cluster | None = None
        self.failure = ""
        self._failed: dict[str, float] = {}  # when a failed change may be tried again, by lease or seat

    def settle(self, cluster: Cluster) -> None:
        """Change seats to match this snapshot from now on."""
        self.cluster = cluster
        self._seats.notify()

    async def run(self) -> None:
        """Change seats until cancelled.

        Raises:
            Superseded: a newer broker is at work.
        """
        while True:
            change: Change | None = None
            try:
                change = await self._next_change()
                if change is None:
                    self.failure = self.failure if self._failed else ""
                    await self._seats.wait(ROUND_S)
                else:
                    assert self.cluster is not None
                    await self._seats.apply(change, self.cluster.devices)
            except (KubeError, InvalidRequest) as error:
                if str(error) != self.failure:
                    log.warning("seats: %s", error)
                self.failure = str(error)
                if change is None:  # no seat of an older broker may be changed before it is taken over
                    await asyncio.sleep(_TAKE_OVER_S)
                    continue
                self._failed[_key(change)] = self._clock() + ROUND_S
                await self._seats.wait(0.1)

    async def _next_change(self) -> Change | None:
        """Return the most urgent change; None if there is none that may be tried now.

        Raises:
            KubeError: seats of an older broker cannot be taken over.
        """
        if self.cluster is None or self._seats.age_s > STALE_S:
            return None
        await self._seats.take_over()
        now = self._clock()
        self._failed = {key: at for key, at in self._failed.items() if now < at}
        self._following.forget(self.cluster, now)
        cluster, needed, seats = self._following.needed(self.cluster, now)
        settled = {lease: mine for lease, mine in seats.items() if lease not in self._following.starting}
        changes = reconcile(cluster, needed.by_lease, settled)
        return next((change for change in changes if _key(change) not in self._failed), None)


def _key(change: Change) -> str:
    return change.demand.lease if isinstance(change, Create) else change.seat
