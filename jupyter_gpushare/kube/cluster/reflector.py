"""Local copies of the API server's collections, kept up to date by list and watch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import ApiClient, Expired, WatchEvent, backoff_s
from jupyter_gpushare.kube.cluster.objects import Object, Resource

T = TypeVar("T", bound=Object)

log = logging.getLogger("gpushare.broker")

# A watch ends after this time and is started again.  While that works, the copy is up to date.
WATCH_S = 4
# The answer to one of our requests may arrive after the event that the object is gone; a new list removes it.
RELIST_S = 300.0


@dataclass(eq=False)
class Reflector(Generic[T]):
    """A copy of the objects of one kind in one namespace, by name.

    ``changed`` is called after each list, and when an object is added or removed, or its ``part`` changes.
    """

    client: ApiClient
    kind: Resource[T]
    namespace: str = ""
    selector: str = ""
    changed: Callable[[], None] = lambda: None
    part: Callable[[T], Any] = lambda found: found

    def __post_init__(self) -> None:
        self.objects: dict[str, T] = {}
        self.confirmed_at = float("-inf")  # when the API server last proved that the copy is complete
        self._version, self._listed_at = "", float("-inf")

    def age_s(self, now: float) -> float:
        """Return the seconds since the copy was last confirmed; infinite before the first list."""
        return now - self.confirmed_at

    async def run(self) -> None:
        """Keep the copy up to date until cancelled."""
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
                else:  # an event that cannot be read would end each watch from this version
                    self._version = ""
                failures += 1
                await asyncio.sleep(backoff_s(failures))

    async def _follow(self) -> None:
        """List if a list is due, then watch for `WATCH_S`."""
        scope = {"namespace": self.namespace, "selector": self.selector}
        if not self._version or time.monotonic() - self._listed_at > RELIST_S:
            found = await self.client.list(self.kind, **scope)
            # Our own requests may have returned objects that are newer than the list.
            newer = {
                n: o
                for n, o in self.objects.items()
                if _number(o.metadata.resource_version) > _number(found.version)
            }
            self._version, self.confirmed_at = found.version, time.monotonic()
            self._listed_at = self.confirmed_at
            self.objects = {item.metadata.name: item for item in found.items} | newer
            self.changed()
        async for event in self.client.watch(self.kind, self._version, duration_s=WATCH_S, **scope):
            self.confirmed_at = time.monotonic()
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
        """Store an object from an event or from the answer to one of our requests, unless it is older."""
        known = self.objects.get(found.metadata.name)
        if known is None or _is_newer(found, known):
            self.objects[found.metadata.name] = found
            if known is None or self.part(found) != self.part(known):
                self.changed()

    def forget(self, name: str) -> None:
        """Remove an object that is gone."""
        if self.objects.pop(name, None) is not None:
            self.changed()


def _is_newer(found: Object, known: Object) -> bool:
    return _number(found.metadata.resource_version) >= _number(known.metadata.resource_version)


def _number(version: str) -> int:
    """Return a version as a number, which it is in every API server."""
    return int(version) if version.isdigit() else 0
