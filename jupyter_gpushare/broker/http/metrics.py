"""Prometheus metrics, read from the registry at each scrape.

Labels are bounded: projects as configured, states, device UUIDs; never users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from jupyter_gpushare.broker.state.registry import Registry
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


def collectors(registry: Registry) -> CollectorRegistry:
    """Return a registry with the broker's numbers."""
    result = CollectorRegistry()
    result.register(RegistryCollector(registry))
    return result
