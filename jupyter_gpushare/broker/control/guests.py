"""Hosts and guests: measure each pair, judge whether it pays, and report and count its start and end.

The planner makes and ends pairs (`core.planning.sharing`), and the helper takes a guest off a GPU by itself
when memory is needed.  In between, each round calls `GuestControl.update`: it measures the rates of all
jobs that may share a GPU, and judges each pair when that is due (`core.pairs`).  A pair that does not pay is
recorded as parted; then the planner takes the guest off.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.state.observations import Companion, Observation
from jupyter_gpushare.broker.state.records import LeaseRecord, PartedPairs
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import State, Why
from jupyter_gpushare.core.pairs import KEEPS, PairDecision, PairVerdict, Reading, judge

log = logging.getLogger("gpushare.broker")

_ACTION = "guest"
# Of a longer time between two measurements, only this much counts.
_MAX_STEP_S = 5.0


@dataclass(slots=True)
class _Pair:
    """A running host with a running guest."""

    host: str  # id of its lease
    began_at: float
    measured_at: float
    verdict: PairVerdict | None = None


class GuestControl:
    """Measures and judges all pairs of this machine."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._pairs: dict[str, _Pair] = {}  # by guest
        self._began_at = registry.clock()

    async def update(self, now: float) -> None:
        """Measure and judge all pairs; the next snapshot has the results.

        Raises:
            StoreError: the database failed.
        """
        registry = self._registry
        together = {guest.id: host for guest, host in self._together()}
        for guest_id in self._pairs.keys() - together.keys():
            await self._ended(guest_id, self._pairs.pop(guest_id), now)
        for guest_id, host in together.items():
            if guest_id not in self._pairs or self._pairs[guest_id].host != host.id:
                self._pairs[guest_id] = _Pair(host.id, now, now)
                registry.observations[guest_id].left_host = None
                # An earlier broker has reported older pairs to their owners.
                if registry.leases[guest_id].entered_at >= self._began_at:
                    await report_arrival(registry, host)
        self._measure(now)
        at_work = snapshot.at_work(registry, now)
        for guest_id, pair in self._pairs.items():
            if pair.verdict is None or now >= pair.verdict.next_at:
                await self._judge(guest_id, pair, now)
            self._note(guest_id, pair, now, at_work)

    def _together(self) -> Iterator[tuple[LeaseRecord, LeaseRecord]]:
        for record in self._registry.index.placed.values():
            host = self._registry.leases.get(record.lease.host) if record.lease.host else None
            if record.state is State.RUNNING and host is not None and host.state is State.RUNNING:
                yield record, host

    def _measure(self, now: float) -> None:
        """Measure the memory and the rate of each running job that may share its GPU."""
        registry = self._registry
        companions = {pair.host: guest_id for guest_id, pair in self._pairs.items()}
        companions |= {guest_id: pair.host for guest_id, pair in self._pairs.items()}
        for record in registry.index.placed.values():
            observation, job = registry.observations[record.id], registry.job_of(record)
            sample = observation.sample
            if record.id not in companions:
                observation.companion = None
            if job is None or sample is None or record.state is not State.RUNNING or not record.lease.share:
                continue
            used = max(sample.used_bytes.values(), default=0)
            observation.peak.saw(used, now)
            observation.max_bytes = max(observation.max_bytes, used)
            at, done, total = observation.measured_at, job.done, job.total or 0.0
            reading = Reading(at=at, attempt=record.attempt, done=done, total=total, work=sample.work)
            observation.rates.add(reading, companions.get(record.id, ""))

    async def _judge(self, guest_id: str, pair: _Pair, now: float) -> None:
        observations = self._registry.observations
        host, guest = observations[pair.host].rates, observations[guest_id].rates
        pair.verdict = verdict = judge(host, guest, pair.began_at, now)
        if verdict.decision is PairDecision.UNDECIDED:
            return
        log.info(
            "guest=%s host=%s %s: %s, host keeps %s, guest has %s",
            guest_id, pair.host, verdict.decision, verdict.why, verdict.host, verdict.guest,
        )  # fmt: skip
        if verdict.decision is PairDecision.PART:
            await self._part(guest_id, pair, now, briefly=not verdict.is_remembered)

    async def _part(self, guest_id: str, pair: _Pair, now: float, *, briefly: bool = False) -> None:
        registry = self._registry
        host_key, guest_key = (self._key(id) for id in (pair.host, guest_id))
        registry.parted.add(host_key, guest_key, now, briefly=briefly)
        if not registry.journal.is_disk_full:
            await registry.journal.commit(PartedPairs(rows=registry.parted.rows()))

    def _key(self, lease_id: str) -> str:
        job = self._registry.jobs.get(lease_id[1:])
        return snapshot.pair_key(job.user, job.command) if job is not None else ""

    def _note(self, guest_id: str, pair: _Pair, now: float, at_work: Collection[str]) -> None:
        """Note with both jobs what each gets of the GPU."""
        observations, verdict = self._registry.observations, pair.verdict
        passed_s, pair.measured_at = min(_MAX_STEP_S, now - pair.measured_at), now
        host, guest = observations[pair.host], observations[guest_id]
        guest_part = _guest_part(guest, guest_id in at_work, pair.host in at_work)
        guest.guest_gpu_s += passed_s * guest_part
        kept = (None, None) if verdict is None else (verdict.host, verdict.guest)
        host.companion = Companion("host", guest_id, kept[0], guest_part, pair.began_at)
        guest.companion = replace(host.companion, role="guest", other=pair.host, kept=kept[1])

    async def _ended(self, guest_id: str, pair: _Pair, now: float) -> None:
        registry = self._registry
        host, guest = registry.leases.get(pair.host), registry.leases.get(guest_id)
        for each in (pair.host, guest_id):
            if each in registry.observations:
                registry.observations[each].companion = None
        why, took_s = ("ended", None) if guest is None else (guest.why, None)
        if guest is not None and (found := registry.observations[guest_id].left_host) is not None:
            why, took_s = found
        if host is not None and why in (Why.HOST_MEMORY_WANTED, Why.OWN_MEMORY_WANTED):
            registry.observations[host.id].peak.reset()
        kept = pair.verdict.host if pair.verdict is not None else None
        await report_departure(registry, host, str(why), took_s=took_s, kept=kept)
        if guest is not None and guest.why == Why.CANNOT_YIELD:
            # The guest lost its work, and would lose it again whenever this host needs memory.
            await self._part(guest_id, pair, now)


def _guest_part(guest: Observation, is_at_work: bool, host_is_at_work: bool) -> float:
    """Return the part of the device's time that a guest got lately, from 0 to 1.

    The helper measures its share only while both compute; while the host is idle, a working guest gets all.
    """
    share = guest.sample.measured_share if guest.sample is not None else 0.0
    return share if share >= 0 and host_is_at_work else float(is_at_work)


async def report_arrival(registry: Registry, host: LeaseRecord) -> None:
    """Notify the owner of ``host`` that a guest is on one of its devices.

    Raises:
        StoreError: the database failed.
    """
    await registry.record_notice(host, _ACTION, "notice.guest_came")


async def report_departure(
    registry: Registry,
    host: LeaseRecord | None,
    why: str,
    *,
    took_s: float | None = None,
    kept: float | None = None,
) -> None:
    """Count the departure of a guest, and notify the owner of its host; ``host`` is None if it has ended.

    ``why`` is `Why.HOST_MEMORY_WANTED`, with the seconds that the host waited (``took_s``);
    `Why.PAIR_PARTED`, with the part of its speed that the host kept (``kept``); or another reason, such as
    "ended" or `Why.CAPACITY_BACK`.

    Raises:
        StoreError: the database failed.
    """
    registry.tally.guests_left[str(why)] += 1
    if host is None:
        return
    if why == Why.HOST_MEMORY_WANTED and took_s is not None:
        waited = messages.text("duration.seconds", f"{took_s:.1f}")
        await registry.record_notice(host, _ACTION, "notice.guest_gave_way", waited)
    elif why == Why.PAIR_PARTED and kept is not None and kept < KEEPS:
        await registry.record_notice(host, _ACTION, "notice.guest_slowed", f"{100 * kept:.0f}")
    else:
        await registry.record_notice(host, _ACTION, "notice.guest_left")
