"""Prometheus metrics, read from the registry at each scrape.

Labels are bounded: projects as configured, states, reasons, device UUIDs; never users.
Gauges are read from the registry; counters and histograms count since the broker started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.usage import Durations
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU


class RegistryCollector:
    """Creates metric families from the registry at every scrape."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now, in the families of Prometheus."""
        registry = self._registry
        leases = GaugeMetricFamily("gpushare_leases", "Living leases", labels=["project", "kind", "state"])
        counted = Counter((r.lease.project, r.lease.kind, r.state) for r in registry.leases.values())
        for (project, kind, state), count in counted.items():
            leases.add_metric([project, kind, state], count)
        yield leases
        held: Counter[str] = Counter()
        for record in registry.leases.values():
            if record.state in HOLDS_CAPACITY:
                for uuid in record.lease.devices:
                    held[uuid] += record.lease.held_milli
        allocation = GaugeMetricFamily(
            "gpushare_device_held_gpus", "Held part of a device", labels=["device"]
        )
        used = GaugeMetricFamily("gpushare_device_used_bytes", "Device memory in use", labels=["device"])
        busy = GaugeMetricFamily(
            "gpushare_device_utilization_ratio",
            "Share of time it computed",
            labels=["device"],
        )
        for device in registry.devices.measured:
            allocation.add_metric([device.uuid], held[device.uuid] / WHOLE_GPU)
            used.add_metric([device.uuid], device.used_bytes)
            busy.add_metric([device.uuid], device.utilization_percent / 100)
        yield from (allocation, used, busy)
        saved = GaugeMetricFamily("gpushare_host_saved_bytes", "Suspended device state in host memory")
        saved.add_metric([], registry.devices.host_saved_bytes)
        yield saved
        epoch = GaugeMetricFamily("gpushare_broker_epoch", "Starts of the broker on this database")
        epoch.add_metric([], registry.store.epoch)
        yield epoch
        writable = GaugeMetricFamily(
            "gpushare_database_writable", "0: the disk of the database is full, or it does not answer"
        )
        writable.add_metric([], not registry.journal.takes_nothing)
        yield writable


class TallyCollector:
    """Creates counters and histograms of what happened since the broker started."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and histograms as they are now."""
        tally = self._registry.tally
        yield _counter(
            "gpushare_transitions", "Changes of state of leases", ("kind", "from", "to"), tally.moves.items()
        )
        yield _counter(
            "gpushare_decisions",
            "Entries of the log of decisions: preemptions, losses, the watchdog's findings",
            ("action", "why"),
            self._registry.decisions.counted.items(),
        )
        spawns = [((outcome,), count) for outcome, count in tally.spawns.items()]
        yield _counter("gpushare_spawns", "Servers with a GPU asked for, by outcome", ("outcome",), spawns)
        gpu_s = [((use,), seconds) for use, seconds in tally.gpu_s.items()]
        yield _counter("gpushare_gpu_seconds", "GPU-seconds by use of the machine", ("state",), gpu_s)
        slept = {"": tally.suspend}
        yield _histogram("gpushare_suspend_seconds", "Seconds to put a lease to sleep", (), slept)
        yield _histogram(
            "gpushare_wake_seconds", "Seconds of a wake: waiting for the GPU, copying", ("phase",), tally.wake
        )
        yield _histogram(
            "gpushare_start_seconds", "Seconds from grant to the first process", ("kind",), tally.start
        )
        yield _histogram(
            "gpushare_queue_wait_seconds", "Seconds that jobs waited for a GPU", ("project",), tally.queue
        )


def _counter(
    name: str, text: str, labels: tuple[str, ...], counts: Iterable[tuple[Iterable[str], float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts:
        family.add_metric([str(value) for value in values], count)
    return family


def _histogram(
    name: str, text: str, labels: tuple[str, ...], found: Mapping[str, Durations]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for value, durations in found.items():
        buckets = list(durations.buckets())
        family.add_metric([str(value)] if labels else [], buckets=buckets, sum_value=durations.sum_s)
    return family


def collectors(registry: Registry) -> CollectorRegistry:
    """Return a registry with the broker's numbers."""
    result = CollectorRegistry()
    result.register(RegistryCollector(registry))
    result.register(TallyCollector(registry))
    return result
