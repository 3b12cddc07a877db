"""Checks of requests: the rights of the project, the bounds of the site, the engine's answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import inf

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import WHOLE_GPU, Grant, Kind, Lease, Why
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import Conflict, InvalidRequest, NotAllowed, NotFound
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")

# A request waits this long for the first sample after a start of the broker.
_FIRST_SAMPLE_S = 3.0


class RequestPolicy:
    """Checks requests against the site's policy."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self.registry = registry
        self.engine = engine

    def choose_project(self, groups: Sequence[str], wanted: str | None) -> str:
        """Return the project to which a request counts.

        Raises:
            NotFound: there is no such project, or it is not the user's.
            NotAllowed: the user belongs to no project.
        """
        allowed = self.registry.policy.projects_of(groups)
        if wanted is not None:
            if wanted not in allowed:
                name, reason = repr(wanted[:60]), "unknown_project"
                if not allowed:
                    raise NotFound("there is no project %1 for you; you belong to none", name, reason=reason)
                names = ", ".join(allowed)
                raise NotFound("there is no project %1 for you; yours: %2", name, names, reason=reason)
            return wanted
        if not allowed:
            raise NotAllowed("you belong to no project that may use GPUs: ask the admin of this Hub")
        return allowed[0]

    def project_of(self, request: wire.SpawnRequest) -> str:
        """Return the project of a session that starts; see `choose_project`."""
        return self.choose_project(request.groups, request.options.project if request.options else None)

    def check_share(self, size: Size) -> None:
        """Enforce the minimum fraction of a GPU, so that a few users cannot exhaust the lease slots.

        Raises:
            InvalidRequest: the size is less than the minimum.
        """
        min_milli = self.registry.policy.min_fraction_milli
        if size.memory_bytes:
            smallest = min((d.grantable_bytes for d in self.registry.devices.for_planner()), default=0)
            min_bytes = smallest * min_milli // WHOLE_GPU
            if size.memory_bytes < min_bytes:
                raise InvalidRequest(
                    "ask for at least %1: less is not given out here", messages.gibibytes(min_bytes)
                )
        elif size.fraction_milli < min_milli:
            raise InvalidRequest(
                "ask for at least %1 GPU: less is not given out here", f"{min_milli / WHOLE_GPU:g}"
            )

    def check_priority(self, project: str, priority: int) -> None:
        """Enforce the highest priority that members of a project may give to their jobs.

        Raises:
            InvalidRequest: the priority is higher.
        """
        if priority > (maximum := self.max_priority(project)):
            raise InvalidRequest(
                "priority is at most %1 in project %2: an administrator can raise that (priority_max)",
                maximum,
                project,
            )

    def max_priority(self, project: str) -> int:
        """Return the highest priority that members of a project may give to their jobs."""
        return self.registry.policy.priority_max(project, self.registry.overrides.get(project))

    async def devices_known(self) -> None:
        """Return when the devices are known; wait if the broker has just started.

        Raises:
            Conflict: the device helper does not answer.
        """
        if self.registry.devices.inventory is None:
            notifications = self.registry.notifications
            await notifications.wait_after(notifications.seq, _FIRST_SAMPLE_S)
        if not self.registry.devices.are_known(self.registry.clock()):
            raise Conflict(
                "the GPUs of this machine cannot be reached just now; a server without GPU starts anyway",
                reason="devices_unknown",
            )

    async def session(
        self, request: wire.SpawnRequest, size: Size, lease_id: str, *, waits: bool = False
    ) -> Lease:
        """Return the lease for the request of a session, without a check that a device can ever hold it.

        Raises:
            RequestError: it can never start; the text is for the user.
        """
        project = self.project_of(request)
        await self.devices_known()
        self.check_share(size)
        now = self.registry.clock()
        return Lease(
            id=lease_id,
            project=project,
            kind=Kind.BUILD,
            size=size,
            user=request.user,
            server=request.server,
            waits=waits,
            submitted_at=now,
            queued_at=now,
            waits_since_at=now,
        )

    async def admit(
        self,
        request: wire.SpawnRequest,
        size: Size,
        lease_id: str,
        *,
        until: float = inf,
        first: wire.SizeRequest | None = None,
    ) -> tuple[Lease, Grant]:
        """Return the lease of a session that starts, and the engine's grant.

        No other task runs between the engine's answer and the return.

        ``until`` is a deadline (monotonic); without a grant by then, the start is refused.  ``first`` is the
        request of a running server for its first GPU, None for a server that starts.

        Raises:
            RequestError: the start is refused; the text is for the user.
        """
        registry = self.registry
        lease = await self.session(request, size, lease_id)
        if registry.by_server(lease.user, lease.server) is not None:
            raise Conflict("this server has a GPU: change its size", reason="has_gpu")
        if lease.id in registry.leases:
            raise lost_gpu()
        answer = await snapshot.admit(
            registry, self.engine, lease, not_nodes=request.not_nodes, until=until, starts=first is None
        )
        if isinstance(answer, Explanation):
            raise _no_capacity(lease, answer, is_running=first is not None)
        if first is not None:
            check_borrows(lease, size, borrows=answer.borrowed, allowed=first.borrow)
            if any(uuid.startswith("MIG-") for uuid in answer.devices):
                # The processes of a running server cannot be pointed at a MIG device.
                raise Conflict(
                    "here a server gets a part of a MIG device only when it starts: stop it, and start it "
                    "with %1",
                    size.text,
                    reason="not_resizable",
                )
        return lease, answer


def check_borrows(lease: Lease, size: Size, *, borrows: bool, allowed: bool) -> None:
    """Refuse a size that borrows, so that the session may be put to sleep for others, if that is not allowed.

    Raises:
        Conflict: the size borrows, and the request does not allow that.
    """
    if borrows and not allowed:
        raise Conflict(
            "with %1 this session is more than what project %2 is guaranteed: allow that it sleeps when "
            "others need the GPU, or choose a smaller size",
            size.text,
            lease.project,
            reason="would_borrow",
        )


def lost_gpu() -> Conflict:
    """Return the refusal of a first GPU for a server that had one and lost it."""
    return Conflict("this server had a GPU and lost it: stop it, and start it with a GPU")


def _no_capacity(lease: Lease, answer: Explanation, *, is_running: bool) -> Conflict:
    """Return the refusal of a session, with advice for a server that starts or one that ``is_running``."""
    why = messages.waiting(answer.why, needs=messages.needs_of(lease), free_milli=answer.free_milli)
    if answer.why is Why.AWAITING_RELEASE:
        advice = "%1 Start it again with the same size: it goes on from here."
    elif is_running:
        advice = "%1 Choose a smaller size, or try again later."
    else:
        advice = "%1 Choose a smaller size, or start without a GPU."
    return Conflict(advice, messages.english(why), reason="no_capacity")
