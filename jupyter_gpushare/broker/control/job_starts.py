"""Starts and ends of the servers of training jobs.

Such a server starts only after the grant of its job, and only at the request of this broker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.control.job_request import job_spec
from jupyter_gpushare.broker.control.ownership import Ownership
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.transitions import started_as
from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import Conflict, GpuShareError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import exact

log = logging.getLogger("gpushare.broker")

# A job skips a node that had no capacity for its server, for this time.
_AVOID_S = 600.0


class JobStarts:
    """Starts and ends of jobs' servers."""

    def __init__(self, effects: Effects, ownership: Ownership) -> None:
        self.registry = effects.registry
        self.devices = effects.devices
        self.effects = effects
        self.ownership = ownership

    async def start(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        """Return what the server of a granted job may use.

        Raises:
            RequestError: the server must not start; the text is for the user.
            StoreError: the database failed; the broker ends.
        """
        record = self.registry.by_handle(request.server)
        job = self.registry.job_of(record) if record is not None else None
        if record is None or job is None or record.state is not State.GRANTED:
            raise _not_expected(request)
        if record.lease.user != request.user:
            owner = self.registry.owners.of.get(record.lease.user)
            if owner is None or owner.name != request.user:
                raise _not_expected(request)
            refused = Conflict("job %1 is of an earlier user of this name", job.id, reason="other_owner")
            await self.effects.start_failed(record, str(refused), is_owner_unknown=True)
            raise refused
        self._check_ticket(request, record)
        if record.lease.project not in self.registry.policy.projects_of(request.groups):
            refused = Conflict(
                "%1 is no member of project %2", request.user, record.lease.project, reason="not_a_member"
            )
            await self.effects.start_failed(record, str(refused))
            raise refused
        moves = request.sees_all_gpus and wire.decode_stored(job.request, wire.JobTerms).move
        if (record.uid, record.moves) != (request.uid, moves):
            record = await self.registry.edit(record, started_as(request.uid, moves=moves))
        else:
            await self.registry.journal.durable()
        try:
            grant = await self.effects.grant(record)
        except GpuShareError:
            # The spawner does not release a lease after a refusal.
            current = self.registry.by_handle(request.server)
            if current is not None and current.state is State.GRANTED:
                await self.effects.start_failed(
                    current, "the Hub could not start its server", has_no_room=bool(current.lease.host)
                )
            raise
        current = self.registry.by_handle(request.server)
        if current is None or current.state is not State.GRANTED:
            # The attempt was stopped meanwhile; if its files stayed, its runner would start the command.
            await self.devices.drop(record.handle)
            raise Conflict("the attempt %1 was stopped while its server started", request.server)
        return wire.replace(grant, job=job_spec(job, record.attempt, record.settled))

    def _check_ticket(self, request: wire.SpawnRequest, record: LeaseRecord) -> None:
        """Refuse a start for which this broker did not ask the Hub.

        Raises:
            Conflict: another broker asked for it, or none.
        """
        epoch = self.effects.tickets.epoch_of(ServerKey(request.user, request.server), request.ticket)
        if epoch is None:
            raise _not_expected(request)
        if epoch == self.registry.store.epoch:
            return
        log.warning("lease=%s refused: its start is of a broker with epoch %d", record.handle, epoch)
        if epoch < self.registry.store.epoch:
            self.effects.on_outdated_start(record)
        raise Conflict(
            "another broker asked for the start of %1: the present one starts this job again",
            request.server,
            reason="outdated_start",
        )

    async def stop(self, request: wire.SpawnStop) -> None:
        """Note that a job's server has ended; a repeated call changes nothing.

        The end of a running job comes from its runner's report, or the observer finds its processes gone.
        """
        user = self.ownership.find(request.user, exact(request.created)) or request.user
        record = self.registry.by_server(user, request.server)
        if record is None or record.state is State.STOPPING:
            await self.registry.journal.durable()
        elif record.state is State.GRANTED:
            self._avoid(record, request.not_nodes)
            await self.effects.start_failed(record, "the Hub could not start its server")

    def _avoid(self, record: LeaseRecord, not_nodes: Iterable[str]) -> None:
        """Note that the node of this attempt had no capacity, so that the next attempt avoids it."""
        nodes = self.registry.devices.nodes_of(record.lease.devices)
        for node in nodes.intersection(not_nodes):
            self.registry.observations[record.id].avoids[node] = self.registry.clock() + _AVOID_S


def _not_expected(request: wire.SpawnRequest) -> Conflict:
    return Conflict(
        "%1 is a name for training jobs, and no such job is to start now: submit jobs with gpushare submit",
        request.server,
        reason="not_expected",
    )
