"""Return seats that KAI placed on other devices than those of their lease.

Device memory returns only to the devices that it came from.  On a node with several GPUs KAI may
place a return seat on another one: there it helps nothing and keeps a GPU from other work.
`follow.reconcile` deletes it, and the lease asks again later, each time after twice the pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jupyter_gpushare.core.kube.follow import Seats, misplaced_seat
from jupyter_gpushare.core.model import Cluster, State

# A try holds a GPU of the node for some seconds.
FIRST_PAUSE_S = 30.0
MAX_PAUSE_S = 480.0


@dataclass(frozen=True, slots=True)
class Misplaced:
    """The last return seat of a lease that was placed on other devices."""

    seat: str
    pause_s: float
    retry_at: float  # the lease asks for no seat before


def note_misplaced(
    cluster: Cluster, seats: Seats, known: Mapping[str, Misplaced], now: float
) -> dict[str, Misplaced]:
    """Return the misplaced seats by lease; ``known`` is the answer to the last call.

    What is known of a lease is kept as long as it is suspended.
    """
    found: dict[str, Misplaced] = {}
    for lease in cluster.leases:
        seat, last = misplaced_seat(lease, seats), known.get(lease.id)
        if seat is not None and (last is None or last.seat != seat.name):
            pause_s = FIRST_PAUSE_S if last is None else min(2 * last.pause_s, MAX_PAUSE_S)
            last = Misplaced(seat.name, pause_s, now + pause_s)
        if last is not None and lease.state is State.SUSPENDED:
            found[lease.id] = last
    return found


def delayed(cluster: Cluster, known: Mapping[str, Misplaced]) -> Cluster:
    """Return the cluster with leases that ask for no seat before the end of their pause."""
    if not known:
        return cluster
    leases = (
        replace(x, retry_at=max(x.retry_at, known[x.id].retry_at)) if x.id in known else x
        for x in cluster.leases
    )
    return replace(cluster, leases=tuple(leases))
