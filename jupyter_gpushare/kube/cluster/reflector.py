"""Copies of collections of the API server, kept up to date by list and watch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import (
    ApiClient,
    Expired,
    Resource,
    WatchEvent,
    backoff_s,
)
from jupyter_gpushare.kube.cluster.objects import Object

T = TypeVar("T", bound=Object)

log = logging.getLogger("gpushare.broker")

# A watch ends after so long and is begun again: as long as that works, the copy is up to date.
WATCH_S = 4
# An answer to a request of our own may come after the event that the object is gone.
RELIST_S = 300.0


class Reflector(Generic[T]):
    """The objects of one kind in one namespace, by name.

    ``changed`` is called after each change.
    """

    def __init__(
        self,
        client: ApiClient,
        kind: Resource[T],
        *,
        namespace: str = "",
        selector: str = "",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.objects: dict[str, T] = {}
        self.told_at = float("-inf")  # when the API server last proved that nothing is missing
        self._client = client
        self._kind = kind
        self._namespace = namespace
        self._selector = selector
        self._changed = changed
        self._version = ""
        self._listed_at = float("-inf")

    def age_s(self, now: float) -> float:
        """Return the age of the news, in seconds; infinite before the first list."""
        return now - self.told_at

    async def run(self) -> None:
        """Follow the collection until cancelled."""
        failures = 0
        while True:
            try:
                await self.follow()
                failures = 0
            except Expired:
                self._version = ""
            except KubeError as error:
                if not failures:
                    log.warning("%s: %s", self._kind.plural, error)
                failures += 1
                await asyncio.sleep(backoff_s(failures))

    async def follow(self) -> None:
        """List once, then watch for `WATCH_S`.

        Raises:
            Expired: the next call has to list again.
            KubeError: the API server refused, or does not answer.
        """
        if not self._version or time.monotonic() - self._listed_at > RELIST_S:
            found = await self._client.list(self._kind, self._namespace, self._selector)
            # What requests of our own brought since the list was made.
            later = {n: o for n, o in self.objects.items() if _number(o) > int(found.version or 0)}
            self._version, self._listed_at = found.version, time.monotonic()
            self.objects = {item.metadata.name: item for item in found.items} | later
            self._told()
        watch = self._client.watch(
            self._kind, self._version, namespace=self._namespace, selector=self._selector, for_s=WATCH_S
        )
        try:
            async for event in watch:
                if event is not None:
                    self._apply(event)
                self._told(has_changed=event is not None and event.object is not None)
        except Expired:
            self._version = ""
            raise

    def put(self, found: T) -> None:
        """Take over the answer to a request of our own, before the watch tells it."""
        known = self.objects.get(found.metadata.name)
        if known is None or _is_newer(found, known):
            self.objects[found.metadata.name] = found
            self._changed()

    def forget(self, name: str) -> None:
        """Take over that a deletion of our own is done."""
        if self.objects.pop(name, None) is not None:
            self._changed()

    def _apply(self, event: WatchEvent[T]) -> None:
        self._version = event.version or self._version
        if event.object is None:
            return
        name, known = event.object.metadata.name, self.objects.get(event.object.metadata.name)
        if event.type == "DELETED":
            if known is None or known.metadata.uid == event.object.metadata.uid:
                self.objects.pop(name, None)
        elif known is None or _is_newer(event.object, known):
            self.objects[name] = event.object

    def _told(self, *, has_changed: bool = True) -> None:
        self.told_at = time.monotonic()
        if has_changed:
            self._changed()


def _number(found: Object) -> int:
    """Version of an object: a number in every API server."""
    version = found.metadata.resource_version
    return int(version) if version.isdigit() else 0


def _is_newer(one: Object, other: Object) -> bool:
    return _number(one) >= _number(other)
