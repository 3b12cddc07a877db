"""The queue of the spawn page, where sessions wait until their capacity is reserved.

`state.session_queue` holds the places.
"""

from __future__ import annotations

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.request_policy import RequestPolicy
from jupyter_gpushare.broker.state.records import random_id
from jupyter_gpushare.broker.state.session_queue import QueuePlace
from jupyter_gpushare.errors import Conflict
from jupyter_gpushare.protocol import wire


async def wait(policy: RequestPolicy, request: wire.SpawnRequest) -> QueuePlace | None:
    """Put a server into the queue, or keep it there, and return its place.

    A request without a size gives the place up; then None is returned.

    Raises:
        RequestError: it can never start, too many sessions wait, or this engine has no queue of sessions;
            the text is for the user.
    """
    registry, engine = policy.registry, policy.engine
    queue, now = registry.session_queue, registry.clock()
    size = request.options.size() if request.options else None
    if size is None:
        queue.leave(request.user, request.server, now)
        await registry.notify()
        return None
    if not engine.queues_sessions:
        raise Conflict("sessions do not wait here: start the server, and it is placed or refused")
    if not registry.devices.are_known(now):
        # A restart of the device helper ends no wait.
        kept = queue.keep(request.user, request.server, size, policy.project_of(request), now)
        if kept is not None:
            return kept
    lease = await policy.session(request, size, "b" + random_id(), waits=True)
    engine.check_request(snapshot.cluster(registry, engine, registry.clock()), lease)
    before = queue.of(lease.user, lease.server)
    place = queue.join(lease, lease.queued_at)
    if before is None or before.lease.id != place.lease.id:
        await registry.notify()
    return place
