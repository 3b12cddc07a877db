"""Samples and events of the device helper, noted for each lease and for the machine."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import DeviceBackend
from jupyter_gpushare.broker.control import losses, snapshot
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.state.policy import over_capacity
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import Started
from jupyter_gpushare.broker.state.usage import gpu_breakdown, held_gpus
from jupyter_gpushare.core.model import WHOLE_GPU, Cluster, Lease, State, Why
from jupyter_gpushare.protocol.helper import Event as HelperEvent
from jupyter_gpushare.protocol.helper import EventKind, LeaseSample, Phase, Sample

log = logging.getLogger("gpushare.broker")


# ---- samples of computing and borrowed GPUs, for the sums of use -------------
# The capacity that a project holds over its quota is divided among its leases that may be reclaimed, in
# proportion to their sizes.  So the sums of its users are what the project borrows.

# Between two samples.
SAMPLE_S = 5.0
# Of a longer time between two samples, only this much counts, because nothing is known about it.
_MAX_STEP_S = 60.0


class Metering:
    """Adds a sample to `Registry.usage` every `SAMPLE_S`."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self._registry = registry
        self._engine = engine
        self._sampled_at = registry.clock()

    def sample(self, cluster: Cluster, now: float) -> None:
        """Count the time since the last sample, as if all of it had been like now."""
        passed_s = min(_MAX_STEP_S, now - self._sampled_at)
        if passed_s < SAMPLE_S:
            return
        self._sampled_at = now
        registry = self._registry
        running = [r.lease for r in registry.index.placed.values() if r.state is State.RUNNING]
        if not running:
            return
        at_work, over = snapshot.at_work(registry, now), self._over_quota(cluster, now)
        until = registry.iso_now()
        guests = self._guests(running)
        given: defaultdict[str, float] = defaultdict(float)  # by host
        for guest, gpus in guests.values():
            given[guest.host] += gpus
        for lease in running:
            held = held_gpus(lease)
            computing = max(0.0, held - given[lease.id]) if lease.id in at_work else 0.0
            if lease.id in guests:
                computing = guests[lease.id][1]
            registry.usage.sample(lease, until, passed_s, computing, held * over.get(lease.id, 0.0))
        for guest, gpus in guests.values():
            host = registry.leases[guest.host].lease
            registry.usage.move_to_guest(guest, host, until, passed_s, gpus, over.get(host.id, 0.0))
            registry.tally.guest_gpu_s[guest.project] += passed_s * gpus

    def _guests(self, running: Sequence[Lease]) -> dict[str, tuple[Lease, float]]:
        """Return each guest of a running host, by id, with the part of a GPU's time that it gets."""
        ids = {lease.id for lease in running}
        found = {}
        for lease in running:
            companion = self._registry.observations[lease.id].companion
            if companion is not None and lease.host in ids:
                found[lease.id] = lease, min(1.0, companion.guest_part)
        return found

    def _over_quota(self, cluster: Cluster, now: float) -> dict[str, float]:
        """Return the part of each borrowing lease that is over its project's quota, from 0 to 1."""
        outlook = self._engine.outlook(cluster, now)
        may_be_reclaimed = [lease for lease in cluster.leases if outlook.borrowed.get(lease.id)]
        sizes: defaultdict[str, float] = defaultdict(float)
        for lease in may_be_reclaimed:
            sizes[lease.project] += held_gpus(lease)
        over: dict[str, float] = {}
        for lease in may_be_reclaimed:
            use = outlook.usage.get(lease.project)
            if use is not None and sizes[lease.project]:
                over[lease.id] = min(1.0, use.borrowed_milli / WHOLE_GPU / sizes[lease.project])
        return over


# ---- leases and the machine --------------------------------------------------

# A lease without processes counts as gone after this time; a restarted broker may not have seen them yet.
GONE_S = 3.0


def _service(sample: Sample) -> list[tuple[bool, str]]:
    """Return for each device of a sample whether it takes new work, and why not."""
    return [(device.healthy, device.closed) for device in sample.devices]


class Observer:
    """Keeps `Registry.devices` and the observations of all leases up to date."""

    def __init__(self, registry: Registry, devices: DeviceBackend) -> None:
        self.registry = registry
        self._devices = devices
        self.missed = asyncio.Event()  # the processes of a session have vanished; the Hub may know why
        self._inventory_due = True
        self.epoch_checked = asyncio.Event()
        self.answered_at = float("-inf")  # when the last sample arrived
        self._beyond_machine = ""  # the last warning about quotas

    async def measure(self, *, fresh: bool = True) -> None:
        """Take one sample, and note what it shows of each lease.

        Without ``fresh``, parts of the sample may be older (`DeviceBackend.latest`).

        Raises:
            HelperError: no answer, or a newer broker is at work.
            StoreError: the database failed; the broker ends.
        """
        registry, state = self.registry, self.registry.devices
        if not self.epoch_checked.is_set():
            # A restored database has an old epoch.  The epoch is raised only at start: a broker that the
            # helper refuses later has a successor, and must not overtake it.
            await registry.raise_epoch_above(await self._devices.epoch())
            self.epoch_checked.set()
        if self._inventory_due:
            state.inventory = await self._devices.inventory()
            self._inventory_due = False
            self._check_quotas()
        sample = await (self._devices.sample() if fresh else self._devices.latest())
        self.answered_at = registry.clock()
        if sample.at < state.sampled_at:
            return  # a newer sample has arrived meanwhile
        before, now = state.sample, registry.clock()
        # The time of the measurement, not of the answer: a helper with a stuck sampler repeats the last one.
        state.sample, state.sampled_at = sample, min(now, sample.at)
        if not state.are_known(now):
            return  # the sample is too old to judge leases
        by_handle = {s.lease: s for s in sample.leases}
        # Waiting jobs are left out: there may be thousands, with nothing to observe.
        observed = [*registry.index.placed, *(x.id for x in map(registry.by_handle, by_handle) if x)]
        for lease_id in dict.fromkeys(observed):
            if (record := registry.leases.get(lease_id)) is not None:
                found = by_handle.pop(record.handle, None)
                if record.state is not State.PENDING:  # otherwise the sample is of an earlier attempt
                    await self._observe_lease(record, found, now)
        self._observe_machine(sample, now)
        orphans = []
        for lease in by_handle.values():
            if lease.is_gone:
                await self._devices.drop(lease.lease)
            else:
                orphans.append(lease)
        await self._fence_orphans(orphans)
        if before is None or _service(before) != _service(sample):
            await registry.notify()

    def _observe_machine(self, sample: Sample, now: float) -> None:
        registry = self.registry
        usable = [
            device.uuid for device in registry.devices.for_planner() if device.usable or device.draining
        ]
        leases = (record.lease for record in registry.index.placed.values())
        broken, at_work = len(sample.devices) - len(usable), snapshot.at_work(registry, now)
        breakdown = gpu_breakdown(leases, usable, broken, at_work)
        registry.meter.note(breakdown, sample.devices)
        registry.tally.used(breakdown, now)

    async def _fence_orphans(self, orphans: Sequence[LeaseSample]) -> None:
        """Bar the devices of running leases that are missing in the database, until those leases end."""
        state, before = self.registry.devices, self.registry.devices.orphaned
        awake = [orphan for orphan in orphans if orphan.phase is not Phase.SUSPENDED]
        state.orphaned = {uuid: orphan.lease for orphan in awake for uuid in orphan.devices}
        if state.orphaned != before:
            for uuid, lease in state.orphaned.items():
                log.warning("device=%s is used by lease=%s, which the database does not know", uuid, lease)
            await self.registry.notify()

    async def _observe_lease(self, record: LeaseRecord, sample: LeaseSample | None, now: float) -> None:
        observation = self.registry.observations[record.id]
        observation.sample = sample
        at = self.registry.devices.sampled_at
        observation.measured_at = at if sample is None else min(at, sample.measured_at)
        if sample is None or not sample.alive or (record.is_job and sample.runner_ended):
            # A job whose runner ended is gone.  Any other lease may still own the unread processes.
            ended = record.is_job and sample is not None and sample.runner_ended
            unread = sample is not None and sample.unread_since > 0
            aged = observation.measured_at - record.entered_at > GONE_S
            missing = ended or (not unread and (observation.seen_alive or aged))
            if record.state is State.GRANTED:
                observation.gone_since_at = None  # its processes have not started yet
            elif missing and observation.gone_since_at is None:
                observation.gone_since_at = observation.measured_at
                self.registry.changed.set()
                if not record.is_job:
                    self.missed.set()
        else:
            observation.seen_alive, observation.gone_since_at = True, None
            observation.active_at = max(observation.active_at, min(now, sample.active_at))
        if not record.is_job:
            worked_s = observation.pauses.saw(snapshot.idle_since(self.registry, record, now), now)
            if worked_s is not None:
                ago_s = now - observation.pauses.busy_from
                self.registry.usage.worked(record.lease, ago_s, worked_s, self.registry.iso_now())
            await self._observe_low_use(record, now)
        await losses.check(self.registry, self.registry.leases.get(record.id, record), sample, now)
        asleep = record.state is State.SUSPENDED and snapshot.sampled_since_entry(self.registry, record)
        if sample is not None and sample.wanted and asleep:
            await self._wanted(record, queries_only=sample.queries_only)
        if sample is not None and sample.stalled and asleep:
            await self._stalled(record, now)
        is_new = record.state is State.GRANTED and observation.seen_alive and not record.is_job
        if is_new and not self.registry.journal.is_disk_full:
            await self.registry.advance(record, Started())

    async def _observe_low_use(self, record: LeaseRecord, now: float) -> None:
        """Notify a session's owner once that its programs keep the GPU busy without computing."""
        registry, observation = self.registry, self.registry.observations[record.id]
        if record.state is not State.RUNNING:
            return
        low = observation.low_use
        low.saw(observation.active_at, registry.devices.max_utilization_percent(record.lease.devices), now)
        after_s = registry.policy.fake_busy_after_s
        if after_s and low.lasted_s >= after_s and not low.is_notified:
            low.is_notified = True
            await registry.record_notice(record, "low-use", "notice.low_use", messages.duration(low.lasted_s))

    def _check_quotas(self) -> None:
        """Log once if the projects together are guaranteed more than this machine has."""
        registry, total_milli = self.registry, self.registry.devices.total_milli
        found = over_capacity(registry.policy.in_force(total_milli, registry.overrides), total_milli)
        if found and found != self._beyond_machine:
            log.warning("%s", found)
        self._beyond_machine = found

    async def watch(self) -> AsyncIterator[None]:
        """Handle the helper's events until the connection ends; yield once connected and after each event.

        Raises:
            HelperError: there is no connection, it broke, or a newer broker is at work.
        """
        self._inventory_due = True  # a device may have changed while there was no connection
        async for event in self._devices.watch():
            if event is not None:
                await self._on_event(event)
            yield

    async def _on_event(self, event: HelperEvent) -> None:
        record = self.registry.by_handle(event.lease) if event.lease else None
        match event.kind:
            case EventKind.WANTED if record is not None:
                await self._wanted(record, queries_only=event.fields.get("queries_only") == "true")
            case EventKind.ENDED | EventKind.SEAT:
                await self.measure(fresh=False)
                self.registry.changed.set()
            case EventKind.DEVICE:
                await self._on_device_event(event, record)
            case EventKind.OVER_LIMIT if record is not None:
                await self._on_over_limit(event, record)
            case EventKind.UNLEASED_PROCESS:
                await self._on_unleased_process(event)
            case EventKind.GUEST if record is not None:
                wanted = Why.OWN_MEMORY_WANTED if event.reason == "own_memory" else Why.HOST_MEMORY_WANTED
                took_s = float(event.fields.get("took_s", "0"))
                observation = self.registry.observations[record.id]
                observation.left_host = (wanted, took_s)
                if wanted is Why.OWN_MEMORY_WANTED:  # it waits for the memory, so no sample shows the need
                    observation.max_bytes = max(observation.max_bytes, record.guest_bytes)
                await self.measure(fresh=False)
                self.registry.changed.set()
            case EventKind.EVICTED:
                log.warning("lease=%s its GPU processes were ended: %s", event.lease, event.reason)
                why = messages.reason_text(event.reason)
                await self.registry.record_notice(record, "device", "notice.evicted", why)
            case EventKind.DRIVER_KILLED:
                self._inventory_due = True
                log.warning("lease=%s device=%s: %s", event.lease, event.device, event.reason)
                why = messages.reason_text(event.reason)
                await self.registry.record_notice(record, "device", "notice.process_ended", why)
            case _:
                pass

    async def _on_device_event(self, event: HelperEvent, record: LeaseRecord | None) -> None:
        self._inventory_due = True
        found = event.reason or ", ".join(f"{name}={value}" for name, value in event.fields.items())
        log.warning("device=%s changed: %s", event.device, found)
        if record is not None and event.fields.get("healthy") == "false":
            why = messages.reason_text(event.reason)
            await self.registry.record_notice(record, "device", "notice.device_out", why)
        elif record is not None:
            await self.registry.record_notice(record, "device", "notice.device_back")
        await self.registry.notify()

    async def _on_over_limit(self, event: HelperEvent, record: LeaseRecord) -> None:
        log.warning("%s lease=%s device=%s: %s", event.kind, event.lease, event.device, event.reason)
        found = messages.reason_text(event.reason)
        if "pid" in event.fields:
            is_stopped = event.fields.get("action") == "stop"
            key = "notice.process_stopped" if is_stopped else "notice.process_to_stop"
            found = messages.text(key, found, event.fields["pid"], event.fields.get("name", ""))
        await self.registry.record_notice(record, "watchdog", "notice.of", found)

    async def _on_unleased_process(self, event: HelperEvent) -> None:
        """Notify the administrator, and the user in each of the user's leases."""
        registry, uid = self.registry, event.fields.get("uid", "")
        log.warning("%s device=%s uid=%s: %s", event.kind, event.device, uid, event.reason)
        is_contained = event.fields.get("contained") == "true"
        records = registry.of_uid(int(uid)) if uid.isdigit() and not is_contained else []
        user = records[0].lease.user if records else f"uid {uid}"
        pid, name = event.fields.get("pid", ""), event.fields.get("name", "")
        why = messages.reason_text(event.reason)
        notice = messages.text("notice.unleased_process", pid, name, user, event.device, why)
        await registry.record_notice(None, "watchdog", "notice.of", notice)
        for record in records:
            if record.id in registry.leases:
                await registry.record_notice(record, "watchdog", "notice.unleased_of_user", notice)

    async def _wanted(self, record: LeaseRecord, *, queries_only: bool) -> None:
        observation = self.registry.observations[record.id]
        if observation.declined:
            return
        # Frameworks query streams in the background; nobody waits for that while no kernel handles a request.
        if not record.is_job and (observation.requested_at is not None or not queries_only):
            await self.registry.want(record)

    async def _stalled(self, record: LeaseRecord, now: float) -> None:
        """Wake a session that seems to wait in a call that the library does not count."""
        observation = self.registry.observations[record.id]
        if not record.is_job and not observation.declined and observation.wake_by_stall(now):
            log.info("lease=%s wakes: its kernel waits without a counted call", record.handle)
            await self.registry.want(record)
