"""Requests that the broker answers, forwarded with this server's identity.

`FORWARDS` is the whole list: a row names method and path, which are the same here
and at the broker, and the messages that go in and out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

from jupyter_gpushare.protocol import wire
from jupyter_gpushare.server.base import Broker, Handler, Refused, for_user

_JOB = "([a-z0-9]{1,40})"
_LEASE = "([a-z0-9-]{1,64})"


@dataclass(frozen=True, slots=True)
class Forward:
    """One request: ``{}`` in ``path`` stands for the id that ``pattern`` matches."""

    method: str
    path: str
    answer: type[Any]
    pattern: str = ""
    body: type[Any] | None = None  # an empty body is an empty object
    query: tuple[str, ...] = ()  # parameters that are passed on
    status: int = 200


FORWARDS: tuple[Forward, ...] = (
    Forward("GET", "offers", wire.Offers, query=("project", "gpus", "memory", "profile", "borrow")),
    Forward("GET", "history", wire.History),
    Forward("GET", "jobs", wire.JobList, query=("limit",)),
    Forward("POST", "jobs", wire.Job, body=wire.JobRequest, status=201),
    Forward("GET", "jobs/{}", wire.Job, _JOB),
    Forward("PUT", "jobs/{}", wire.Job, _JOB, body=wire.JobChange),
    Forward("DELETE", "jobs/{}", wire.Job, _JOB),
    Forward("PUT", "jobs/{}/place", wire.Job, _JOB, body=wire.JobPlace),
    Forward("GET", "jobs/{}/timeline", wire.JobTimeline, _JOB),
    Forward("POST", "jobs/{}/retry", wire.Job, _JOB, status=201),
    Forward("POST", "leases/{}/resume", wire.LeaseStatus, _LEASE),
    Forward("POST", "leases/{}/stay-asleep", wire.LeaseStatus, _LEASE),
    Forward("POST", "leases/{}/keep", wire.LeaseStatus, _LEASE, body=wire.KeepRequest),
    Forward("POST", "leases/{}/lend", wire.LeaseStatus, _LEASE),
    Forward("POST", "leases/{}/release", wire.LeaseStatus, _LEASE),
)


NONE: Mapping[str, Forward] = MappingProxyType({})


class ForwardHandler(Handler):
    """Forwards the requests to one path."""

    def initialize(self, broker: Broker | None, forwards: Mapping[str, Forward] = NONE) -> None:
        super().initialize(broker)
        self._forwards = forwards

    @for_user
    async def get(self, *ids: str) -> None:
        await self._forward(*ids)

    @for_user
    async def post(self, *ids: str) -> None:
        await self._forward(*ids)

    @for_user
    async def put(self, *ids: str) -> None:
        await self._forward(*ids)

    @for_user
    async def delete(self, *ids: str) -> None:
        await self._forward(*ids)

    async def _forward(self, *ids: str) -> None:
        client = self.connected().client
        forward = self._forwards.get(self.request.method or "")
        if forward is None:
            raise Refused(405, "not_allowed", "%1 is not possible here.", self.request.method)
        body = None
        if forward.body is not None:
            body = self.read(forward.body) if self.request.body else wire.decode(b"{}", forward.body)
        given = {name: self.get_query_argument(name, "") for name in forward.query}
        awaitable = client.request(
            forward.method,
            forward.path.format(*ids),
            forward.answer,
            body,
            params={name: value for name, value in given.items() if value},
            key=self.request.headers.get("Idempotency-Key") if body is not None else None,
        )
        await self.answer(awaitable, forward.status)


def forward_routes(broker: Broker | None) -> list[tuple[str, type[Handler], dict[str, Any]]]:
    """Return one handler per path of `FORWARDS`, below the server's base URL."""
    return [
        (
            "/gpushare/" + path.format(pattern),
            ForwardHandler,
            {"broker": broker, "forwards": {forward.method: forward for forward in forwards}},
        )
        for (path, pattern), forwards in groupby(FORWARDS, lambda each: (each.path, each.pattern))
    ]
