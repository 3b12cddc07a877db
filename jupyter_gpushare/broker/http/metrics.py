"""Prometheus metrics, read from the registry at each scrape.

Labels are bounded: configured projects, states, reasons, device UUIDs; never users.
Gauges show the registry; counters and histograms count since the broker started.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.usage import Durations, own_milli
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, State

M = TypeVar("M", GaugeMetricFamily, CounterMetricFamily)


class Numbers:
    """Creates the metric families from the registry at each scrape."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics as Prometheus families."""
        registry, found = self._registry, self._registry.devices.measured
        leases = Counter((r.lease.project, r.lease.kind, r.state) for r in registry.leases.values())
        yield _gauge("gpushare_leases", "Living leases", leases.items(), "project", "kind", "state")
        held: Counter[str] = Counter()
        for record in registry.leases.values():
            if record.state in HOLDS_CAPACITY:
                for uuid in record.lease.devices:
                    held[uuid] += own_milli(record.lease)
        parts = [((each.uuid,), held[each.uuid] / WHOLE_GPU) for each in found]
        yield _gauge("gpushare_device_held_gpus", "Held part of a device", parts, "device")
        used = [((each.uuid,), each.used_bytes) for each in found]
        yield _gauge("gpushare_device_used_bytes", "Device memory in use", used, "device")
        busy = [((each.uuid,), each.utilization_percent / 100) for each in found]
        yield _gauge("gpushare_device_utilization_ratio", "Share of time it computed", busy, "device")
        for name, shares in _shares(registry).items():
            text = (
                f"Part of a device's time, {name}, of leases that computed beside others in the last minute"
            )
            family = f"gpushare_compute_share_{name}_ratio"
            yield _gauge(family, text, shares.items(), "device", "project")
        guests = Counter((r.lease.project,) for r in registry.leases.values() if r.lease.host)
        yield _gauge("gpushare_guests", "Guests on GPUs of other jobs", guests.items(), "project")
        saved = [((), registry.devices.host_saved_bytes)]
        yield _gauge("gpushare_host_saved_bytes", "Suspended device state in host memory", saved)
        epoch = [((), registry.store.epoch)]
        yield _gauge("gpushare_broker_epoch", "Starts of the broker on this database", epoch)
        takes = [((), not registry.journal.is_blocked)]
        text = "0: the disk of the database is full, or it does not answer"
        yield _gauge("gpushare_database_writable", text, takes)
        yield from _since_start(registry)


def _shares(registry: Registry) -> dict[str, dict[tuple[str, str], float]]:
    """Return the granted and the measured shares of compute time, by device and project.

    They are sums over measured leases only, because a lease that computes alone gets more than its share.
    """
    granted, measured = defaultdict[tuple[str, str], float](float), defaultdict[tuple[str, str], float](float)
    for record in registry.leases.values():
        observation = registry.observations[record.id]
        sample, companion = observation.sample, observation.companion
        if record.state is State.RUNNING and sample is not None and sample.measured_share >= 0:
            for uuid in record.lease.devices:
                part = companion.granted if companion else record.lease.held_milli / WHOLE_GPU
                granted[uuid, record.lease.project] += part
                measured[uuid, record.lease.project] += sample.measured_share
    return {"granted": granted, "measured": measured}


def _since_start(registry: Registry) -> Iterator[Metric]:
    """Yield the counters and histograms since the broker started."""
    tally = registry.tally
    moves = tally.moves.items()
    yield _counter("gpushare_transitions", "Changes of state of leases", moves, "kind", "from", "to")
    text = "Entries of the log of decisions: preemptions, losses, the watchdog's findings"
    yield _counter("gpushare_decisions", text, registry.decisions.counted.items(), "action", "why")
    spawns = [((outcome,), count) for outcome, count in tally.spawns.items()]
    yield _counter("gpushare_spawns", "Servers with a GPU asked for, by outcome", spawns, "outcome")
    gpu_s = [((use,), seconds) for use, seconds in tally.gpu_s.items()]
    yield _counter("gpushare_gpu_seconds", "GPU-seconds by use of the machine", gpu_s, "state")
    got_s = [((project,), seconds) for project, seconds in tally.guest_gpu_s.items()]
    yield _counter("gpushare_guest_gpu_seconds", "GPU-seconds that guests got", got_s, "project")
    departures = [((why,), count) for why, count in tally.guests_left.items()]
    yield _counter("gpushare_guests_left", "Guests that left their hosts, by reason", departures, "why")
    slept = {"": tally.suspend}
    yield _histogram("gpushare_suspend_seconds", "Seconds to put a lease to sleep", slept)
    text = "Seconds of a wake: waiting for the GPU, copying"
    yield _histogram("gpushare_wake_seconds", text, tally.wake, "phase")
    yield _histogram("gpushare_start_seconds", "Seconds from grant to the first process", tally.start, "kind")
    text = "Seconds that jobs waited for a GPU"
    yield _histogram("gpushare_queue_wait_seconds", text, tally.queue, "project")


Values = Iterable[tuple[Iterable[str], float]]


def _gauge(name: str, text: str, values: Values, *labels: str) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _counter(name: str, text: str, values: Values, *labels: str) -> CounterMetricFamily:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: M, values: Values) -> M:
    for labels, value in values:
        family.add_metric([str(label) for label in labels], value)
    return family


def _histogram(name: str, text: str, found: Mapping[str, Durations], *labels: str) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for value, durations in found.items():
        buckets = list(durations.buckets())
        family.add_metric([str(value)] if labels else [], buckets=buckets, sum_value=durations.sum_s)
    return family


def collectors(registry: Registry) -> CollectorRegistry:
    """Return a Prometheus registry with the broker's metrics."""
    result = CollectorRegistry()
    result.register(Numbers(registry))
    return result
