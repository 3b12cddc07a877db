"""Requests of the Hub's spawner, with its token and over a channel on which it verified the broker."""

from __future__ import annotations

import os
import socket
from math import inf

from tornado import iostream

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import page_queue
from jupyter_gpushare.broker.control.loop import is_job_server
from jupyter_gpushare.broker.control.sessions import ANSWER_S
from jupyter_gpushare.broker.http.base import Base, Control
from jupyter_gpushare.broker.state.session_queue import QueuePlace
from jupyter_gpushare.broker.views.views import spawn_wait
from jupyter_gpushare.errors import NotAllowed, RequestError
from jupyter_gpushare.listener import HUB
from jupyter_gpushare.peers import source_of
from jupyter_gpushare.protocol import wire

# Sources of the spawner's faults in `Faults`, and the maximum length of a fault.
_SPAWNER, _PATIENCE = "spawner", "start_timeout of the spawner"
_MAX_FAULT_CHARS = 500


# ---- requests for a session, or for a job if the server has the name of one; first the owner is met


async def start(control: Control, request: wire.SpawnRequest) -> wire.SpawnGrant:
    """Return the grant for a server that is about to start.

    Raises:
        RequestError: the server must not start; the text is for the user.
        StoreError: the database failed; the broker ends.
    """
    patience_s = inf if request.patience_s is None else request.patience_s - ANSWER_S
    until = control.registry.clock() + patience_s
    await control.ownership.meet_start(request)
    if is_job_server(request.server):
        return await control.job_starts.start(request)
    return await control.sessions.start(request, until)


async def wait(control: Control, request: wire.SpawnRequest) -> QueuePlace | None:
    """Do as `page_queue.wait`, after the owner is met."""
    await control.ownership.meet_start(request)
    return await page_queue.wait(control.request_policy, request)


async def stop(control: Control, request: wire.SpawnStop) -> None:
    """Release the lease of a server that has ended for any reason; repeated calls change nothing."""
    if is_job_server(request.server):
        await control.job_starts.stop(request)
    else:
        await control.sessions.stop(request)


def lacks_patience(start_s: float, patience_s: float | None) -> str:
    """Return what an administrator must set if the Hub gives up on starts too early; else empty.

    ``start_s`` is `Engine.start_s`; ``patience_s`` is `wire.SpawnRequest.patience_s`.
    """
    needed_s = start_s + ANSWER_S
    if not start_s or patience_s is None or patience_s >= needed_s:
        return ""
    return (
        f"The Hub waits {patience_s:g} s for a GPU, half of c.Spawner.start_timeout, and place_timeout and "
        f"seat_timeout of c.GPUShareKube let a start wait {start_s:g} s: it is refused "
        f"earlier. Set start_timeout to at least {2 * needed_s:g}, or seat_timeout to less."
    )


class Spawner(Base):
    """Handler for the Hub's spawner only."""

    async def prepare(self) -> None:
        await super().prepare()
        await self.authorize()

    async def authorize(self) -> None:
        """Check that the request has the spawner's token and came over a channel that verified the broker.

        Raises:
            NotAllowed: it lacks the token, or came over plain TCP, whose port another process may hold.
        """
        is_by_socket = self.stream.socket.family == socket.AF_UNIX
        if not is_by_socket and not isinstance(self.stream, iostream.SSLIOStream):
            raise NotAllowed(
                "the spawner's token is taken over the broker's unix socket or TLS, not over plain HTTP: "
                "set c.GPUShareMixin.broker_url to unix:// or https://",
                reason=wire.UNVERIFIED_CHANNEL,
            )
        if not self.is_spawner():
            raise NotAllowed("only the Hub's spawner may ask this", reason=wire.NOT_THE_SPAWNER)
        self.prove(HUB)

    def is_spawner(self) -> bool:
        """Return whether the request has the spawner's token."""
        return self.service.access.is_spawner(self.request.headers.get("Authorization", ""))


class SpawnerOffers(Spawner):
    """What the spawn page shows to a user."""

    async def get(self) -> None:
        groups = self.get_query_arguments("group")
        project = self.control.request_policy.choose_project(
            groups, self.get_query_argument("project", None) or None
        )
        self.answer(self.service.views.offers(groups, project))


class SpawnerStart(Spawner):
    """A server is about to start."""

    async def get(self) -> None:
        """Answer with the progress of a server's start."""
        user, server = self.get_query_argument("user"), self.get_query_argument("server", "")
        self.answer(self.control.sessions.progress(user, server))

    async def post(self) -> None:
        spawns, request = self.control.registry.tally.spawns, self.body(wire.SpawnRequest)
        if request.options is not None:  # the spawner waits less for a server without a GPU
            if fault := lacks_patience(self.control.engine.start_s, request.patience_s):
                self.control.faults.found(_PATIENCE, fault)
            else:
                self.control.faults.mended(_PATIENCE)
        try:
            grant = await start(self.control, request)
        except RequestError as error:
            spawns[error.reason] += 1
            raise
        spawns["no_gpu" if grant.lease is None else "asleep" if grant.asleep else "granted"] += 1
        self.answer(grant)
        self.control.faults.mended(_SPAWNER)


class SpawnerWait(Spawner):
    """A session waits for its start; it repeats this to keep its place, and leaves by asking for no size."""

    async def post(self) -> None:
        request = self.body(wire.SpawnRequest)
        self.service.limits.waits.take(request.user)
        place = await wait(self.control, request)
        if place is None:
            self.set_status(204)
            return
        self.answer(spawn_wait(self.service.views, place))


class SpawnerFault(Spawner):
    """The Hub's spawner cannot work; administrators see this until a server starts.

    A spawner that cannot read its token is recognized by the uid of its process, which is the Hub's.
    """

    def is_spawner(self) -> bool:
        """Return whether the caller is root or the broker's user on the unix socket, or has the token."""
        source = source_of(self.stream.socket)
        return source in {f"uid {uid} by socket" for uid in (0, os.geteuid())} or super().is_spawner()

    async def post(self) -> None:
        """Note the fault for ``health`` and the page."""
        fault = messages.printable(self.body(wire.SpawnFault).message)[:_MAX_FAULT_CHARS]
        self.control.faults.found(_SPAWNER, f"The Hub's spawner cannot start servers with GPUs: {fault}")
        self.set_status(204)


class SpawnerStop(Spawner):
    """A server has ended."""

    async def post(self) -> None:
        await stop(self.control, self.body(wire.SpawnStop))
        self.set_status(204)
