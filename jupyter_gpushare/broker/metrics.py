"""Numbers for Prometheus, read from the book when they are scraped.

Labels are bounded: projects as configured, states, device UUIDs; never users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.core.model import HOLDS_ROOM, WHOLE_GPU


class BookCollector:
    """Turns the book into metric families at every scrape."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        book = self._book
        leases = GaugeMetricFamily("gpushare_leases", "Living leases", labels=["project", "kind", "state"])
        counted = Counter((r.lease.project, r.lease.kind, r.state) for r in book.leases.values())
        for (project, kind, state), count in counted.items():
            leases.add_metric([project, kind, state], count)
        yield leases
        held: Counter[str] = Counter()
        for record in book.leases.values():
            if record.state in HOLDS_ROOM:
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
        for device in book.sample.devices if book.sample else ():
            allocation.add_metric([device.uuid], held[device.uuid] / WHOLE_GPU)
            used.add_metric([device.uuid], device.used_bytes)
            busy.add_metric([device.uuid], device.utilization_percent / 100)
        yield from (allocation, used, busy)
        saved = GaugeMetricFamily("gpushare_host_saved_bytes", "Suspended device state in host memory")
        saved.add_metric([], book.sample.host_saved_bytes if book.sample else 0)
        yield saved
        epoch = GaugeMetricFamily("gpushare_broker_epoch", "Starts of the broker on this database")
        epoch.add_metric([], book.store.epoch)
        yield epoch


def registry(book: Book) -> CollectorRegistry:
    """Return a registry with the broker's numbers."""
    result = CollectorRegistry()
    result.register(BookCollector(book))
    return result
