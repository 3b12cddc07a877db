"""Base of the handlers below ``/gpushare/``: connection, bodies, answers and errors.

Errors are answered with `ErrorAnswer`.  Writes need the server's XSRF token or an API token,
like all writes to a Jupyter server.  No request counts as activity of the user: an open panel
must not keep a session awake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, GpuShareError, RequestError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.server import launch
from jupyter_gpushare.server.watch import Watch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broker:
    """This server's connection to the broker."""

    client: BrokerClient
    watch: Watch
    server: str  # name of this server; "" for the default server


def for_user(method: Any) -> Any:
    """Restrict a handler's method to authorized users of this server."""
    return web.authenticated(authorized(method))


class Refused(web.HTTPError):
    """Ends a request with an `ErrorAnswer`."""

    def __init__(self, status: int, reason: str, template: str, *values: object) -> None:
        super().__init__(status)
        self.answer = wire.ErrorAnswer.of(GpuShareError(template, *values), status, reason)


class Handler(APIHandler):
    """Base class of the handlers; ``broker`` is None on a server that was started without one."""

    auth_resource = "gpushare"
    _track_activity = False

    def initialize(self, broker: Broker | None) -> None:
        self.broker = broker

    def connected(self) -> Broker:
        """Return the connection to the broker.

        Raises:
            Refused: 404, this server has no broker.
        """
        if self.broker is None:
            raise Refused(404, "not_configured", "This server was started without a GPU broker.")
        return self.broker

    def read(self, kind: type[T]) -> T:
        """Return the message in the request's body.

        Raises:
            Refused: 413, the body is too long.
            InvalidRequest: the body is not JSON, or not this kind of message.
        """
        if len(self.request.body) > wire.MAX_BODY_BYTES:
            raise Refused(413, "too_large", "At most %1 bytes are read.", wire.MAX_BODY_BYTES)
        return wire.decode(self.request.body, kind)

    async def answered(self, awaitable: Awaitable[T]) -> T:
        """Return the broker's answer.

        Raises:
            Refused: the broker refused the request, or does not answer.
        """
        try:
            return await awaitable
        except RequestError as error:
            raise Refused(error.status, error.reason, error.template, *error.values) from None
        except BrokerUnavailable as error:
            raise Refused(503, "unreachable", error.template, *error.values) from None

    async def answer(self, awaitable: Awaitable[Any], status: int = 200) -> None:
        """Finish the request with the broker's answer.

        Raises:
            Refused: the broker refused the request, or does not answer.
        """
        found = await self.answered(awaitable)
        if isinstance(found, wire.Job):
            (found,) = await self.with_outputs([found])
        elif isinstance(found, wire.JobList):
            found = wire.replace(found, jobs=await self.with_outputs(found.jobs))
        self.send(found, status)

    async def with_outputs(self, jobs: list[wire.Job]) -> list[wire.Job]:
        """Return the jobs with the output notebooks that exist on this server's disk."""
        root = getattr(self.contents_manager, "root_dir", "")
        if not root or all(job.source is None for job in jobs):
            return jobs
        return await asyncio.to_thread(lambda: [launch.with_output(job, Path(root)) for job in jobs])

    def send(self, message: Any, status: int = 200) -> None:
        """Finish the request with a message as JSON."""
        self.set_status(status)
        self.set_header("Cache-Control", "no-store")
        self.finish(wire.encode(message))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, RequestError):
            error = Refused(error.status, error.reason, error.template, *error.values)
        if isinstance(error, Refused):
            self.send(error.answer, error.status_code)
        else:
            super().write_error(status_code, **kwargs)

    def log_exception(self, *exc_info: Any) -> None:
        # A refusal is an answer, not a fault of this server.
        if not isinstance(exc_info[1], RequestError | Refused):
            super().log_exception(*exc_info)
