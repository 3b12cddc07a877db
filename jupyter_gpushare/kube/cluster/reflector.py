"""Copies of collections of the API server, kept up to date by list and watch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import ApiClient, Expired, WatchEvent, backoff_s
from jupyter_gpushare.kube.cluster.objects import Object, Resource

T = TypeVar("T", bound=Object)

log = logging.getLogger("gpushare.broker")

# A watch ends after so long and is begun again: as long as that works, the copy is up to date.
WATCH_S = 4
# An answer to a request of our own may come after the event that the object is gone.
RELIST_S = 300.0


def all_but_version(found: Object) -> Object:
    """Return an object without its version, which tells nothing by itself."""
    return replace(found, metadata=replace(found.metadata, resource_version=""))


@dataclass(eq=False)
class Reflector(Generic[T]):
    """The objects of one kind in one namespace, by name.

    ``changed`` is called after each list, and when an object came, left or changed in what ``part``
    returns of it.
    """

    client: ApiClient
    kind: Resource[T]
    namespace: str = ""
    selector: str = ""
    changed: Callable[[], None] = lambda: None
    part: Callable[[T], Any] = all_but_version

    def __post_init__(self) -> None:
        self.objects: dict[str, T] = {}
        self.told_at = float("-inf")  # when the API server last proved that nothing is missing
        self._version, self._listed_at = "", float("-inf")

    def age_s(self, now: float) -> float:
        """Return the age of the news, in seconds; infinite before the first list."""
        return now - self.told_at

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        failures = 0
        while True:
            try:
                await self._follow()
                failures = 0
            except Expired:
                self._version = ""
            except KubeError as error:
                if not failures:
                    log.warning("%s: %s", self.kind.plural, error)
                failures += 1
                await asyncio.sleep(backoff_s(failures))

    async def _follow(self) -> None:
        """List where that is due, then watch for `WATCH_S`."""
        within = {"namespace": self.namespace, "selector": self.selector}
        if not self._version or time.monotonic() - self._listed_at > RELIST_S:
            found = await self.client.list(self.kind, **within)
            # What requests of our own brought since the list was made.
            later = {n: o for n, o in self.objects.items() if _number(o) > int(found.version or 0)}
            self._version, self.told_at = found.version, time.monotonic()
            self._listed_at = self.told_at
            self.objects = {item.metadata.name: item for item in found.items} | later
            self.changed()
        async for event in self.client.watch(self.kind, self._version, for_s=WATCH_S, **within):
            self.told_at = time.monotonic()
            if event is not None:
                self._version = event.version or self._version
                self._apply(event)

    def _apply(self, event: WatchEvent[T]) -> None:
        found = event.object
        if found is None:
            return
        known = self.objects.get(found.metadata.name)
        if event.type != "DELETED":
            self.put(found)
        elif known is not None and known.metadata.uid == found.metadata.uid:
            self.forget(found.metadata.name)

    def put(self, found: T) -> None:
        """Take over an object, of an event or of the answer to a request of our own, if it is not older."""
        known = self.objects.get(found.metadata.name)
        if known is None or _number(found) >= _number(known):
            self.objects[found.metadata.name] = found
            if known is None or self.part(found) != self.part(known):
                self.changed()

    def forget(self, name: str) -> None:
        """Take over that an object is gone."""
        if self.objects.pop(name, None) is not None:
            self.changed()


def _number(found: Object) -> int:
    """Version of an object: a number in every API server."""
    version = found.metadata.resource_version
    return int(version) if version.isdigit() else 0
