"""The Hub's access to the broker: token, pinned certificate, connections, and the request for a start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import weakref
from abc import abstractmethod
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from traitlets.config import LoggingConfigurable

from jupyter_gpushare.channel import api_url
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, GpuShareError, NotSetUp, RequestError
from jupyter_gpushare.hub import options
from jupyter_gpushare.hub.refusals import BROKER_DOWN, NOT_SET_UP, refusal
from jupyter_gpushare.private_files import read_private
from jupyter_gpushare.protocol.wire import (
    JOB_SERVER_NAME,
    NOT_THE_SPAWNER,
    UNVERIFIED_CHANNEL,
    GpuRequest,
    Health,
    SpawnFault,
    SpawnGrant,
    SpawnRequest,
    replace,
)

if TYPE_CHECKING:
    from jupyterhub.spawner import Spawner as _SpawnerBase
else:
    _SpawnerBase = LoggingConfigurable  # the spawner itself may not be the base of a mixin

T = TypeVar("T")
# The start of a server without a GPU waits this long for the broker.
_NO_GPU_TIMEOUT_S = 2.0
_NOT_SET_UP = "the Hub's GPU service is not set up (see the Hub's log)"
# The remedy when the broker answers 404 to the spawner.
WRONG_PATH = (
    "write c.GPUShareMixin.broker_url without a path (the broker's socket, or https://HOST:PORT), and "
    "restart the broker where it is older than the Hub's jupyter-gpushare"
)
_REPORT_S = 2.0
# The Hub may start the broker itself, after its own start.
_FIRST_ANSWER_S = 60.0
_UNKNOWN = "-"
_TOKEN_MAX_BYTES = 4096
_CERTIFICATE_MAX_BYTES = 16_384

# One connection pool per event loop, address, token and certificate; building one costs 20 ms.
_Key = tuple[str, str, str]
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, BrokerClient]]
_clients = weakref.WeakKeyDictionary()


_in_background: set[asyncio.Task[None]] = set()


def connection(url: str, *, token: str, certificate: str, timeout_s: float) -> BrokerClient:
    """Return this event loop's connections to the broker.

    Raises:
        InvalidRequest: not an address, or not a certificate.
    """
    pools = _clients.setdefault(asyncio.get_running_loop(), {})
    key = (url, token, certificate)
    if key not in pools:
        pools[key] = BrokerClient(api_url(url), token, certificate=certificate, timeout_s=timeout_s)
    return pools[key]


def refuses_hub(error: RequestError) -> bool:
    """Return whether the broker refuses this Hub, and not only the user's request."""
    return error.reason in (NOT_THE_SPAWNER, UNVERIFIED_CHANNEL)


def report_fault(url: str, message: str) -> None:
    """Start to report to the administrator, through the broker, why this Hub's spawner cannot work.

    This needs no token: over its unix socket the broker identifies the Hub by the uid of its process.
    """

    async def report() -> None:
        with contextlib.suppress(GpuShareError):  # the Hub's log has the message too
            client = connection(url, token=_UNKNOWN, certificate="", timeout_s=_REPORT_S)
            await client.post("spawner/fault", SpawnFault(message=message), type(None), repeatable=True)

    _begin(report())


def _begin(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _in_background.add(task)
    task.add_done_callback(_in_background.discard)


def check_address(url: str, certificate: str, log: logging.Logger) -> None:
    """Start to check that a broker answers at a spawner's address; if not, log what to change."""

    async def check() -> None:
        with contextlib.suppress(GpuShareError):  # each start logs that no broker runs
            client = BrokerClient(api_url(url), "", certificate=certificate, retry_s=_FIRST_ANSWER_S)
            try:
                await client.get("health", Health)
            except NotSetUp as error:
                log.error("servers with GPUs cannot start: %s: %s", error, WRONG_PATH)
            finally:
                await client.close()

    _begin(check())


def read_token(path: Path) -> str:
    """Return the token on the first line of a file that no other user can read.

    Raises:
        GpuShareError: there is no token, or other users could read or replace the file.
    """
    if not path.name:
        raise GpuShareError("c.GPUShareMixin.broker_token_file is not set")
    lines = read_private(path, _TOKEN_MAX_BYTES).decode("ascii", errors="replace").strip()
    token = lines.partition("\n")[0].strip()
    if not token or not token.isprintable():
        raise GpuShareError(f"{path} holds no token")
    return token


def read_certificate(path: Path) -> str:
    """Return the broker's certificate (PEM).

    Raises:
        GpuShareError: the file cannot be read, holds no certificate, or other users could replace it.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            certificate = file.read(_CERTIFICATE_MAX_BYTES).decode("ascii", errors="replace")
    except OSError as error:
        raise GpuShareError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o022:
        raise GpuShareError(f"{path} can be changed by others: chmod go-w {path}")
    if "-----BEGIN CERTIFICATE-----" not in certificate:
        raise GpuShareError(f"{path} holds no certificate: copy the broker's api-certificate.pem there")
    return certificate


def unverified(spawner: BrokerAccess) -> str:
    """Return why a spawner's settings cannot verify the broker, and the remedy; empty if they can.

    The system's certificate authorities vouch for a name, not for the broker: whoever can get a
    certificate for that name would get the Hub's token.
    """
    urls = (spawner.broker_url, spawner.server_broker_url)
    if spawner.broker_certificate_file or not any(url.startswith("https://") for url in urls):
        return ""
    return (
        "over https:// the broker is known by its own certificate: set "
        "c.GPUShareMixin.broker_certificate_file to a copy of api-certificate.pem of its state_dir"
    )


class BrokerAccess(_SpawnerBase):
    """The mixin's requests to the broker, with the Hub's token."""

    broker_url: str
    server_broker_url: str
    broker_certificate_file: str
    broker_token_file: str
    broker_timeout_s: float

    user: Any  # from the spawner class that this one is combined with
    user_options: dict[str, Any]

    # Whether `server_uid` belongs to one system user, who is the owner of the server.  Then a job that an
    # earlier system user of the same name queued does not start.
    own_uid: ClassVar[bool] = False
    # Whether the broker may hold a lease for this server; unknown after a restart of the Hub.
    _lease_possible = True

    @abstractmethod
    def server_uid(self) -> int:
        """Return the uid that the server's processes will have."""

    @abstractmethod
    def patience_s(self) -> float:
        """Return the seconds that a start with a GPU waits for the broker's answer."""

    @abstractmethod
    def excluded_nodes(self) -> list[str]:
        """Return the nodes of a cluster that this server cannot run on."""

    @abstractmethod
    def may_gain(self) -> bool:
        """Return whether a server that starts without a GPU can get one while it runs."""

    @abstractmethod
    def sees_all_gpus(self) -> bool:
        """Return whether the server's processes can open the device files of all GPUs of the machine."""

    def _identity(self) -> tuple[str, str, list[str]]:
        return self.user.name, self.name, sorted(group.name for group in self.user.groups)

    def _request(self, wanted: GpuRequest | None) -> SpawnRequest:
        """Return the request for this server and its owner; without a GPU if ``wanted`` is None."""
        user, server, groups = self._identity()
        return SpawnRequest(
            user=user,
            server=server,
            groups=groups,
            uid=self.server_uid(),
            options=wanted,
            created=self.user.created,
            own_uid=self.own_uid,
        )

    async def _ask(self, request: GpuRequest | None) -> SpawnGrant | None:
        """Return the broker's grant, or None if no GPU is requested and the broker is unreachable.

        Raises:
            SpawnException: the start is refused; the text is for the user.
        """
        user, server, _ = self._identity()
        needed = request is not None or JOB_SERVER_NAME.fullmatch(server) is not None
        try:
            patience_s = self.patience_s() if needed else _NO_GPU_TIMEOUT_S
            body = replace(
                self._request(request),
                admin=bool(self.user.admin),
                not_nodes=self.excluded_nodes(),
                may_gain=self.may_gain(),
                sees_all_gpus=self.sees_all_gpus(),
                ticket=options.ticket(self.user_options),
                patience_s=patience_s,
            )
            self._lease_possible = True
            async with asyncio.timeout(patience_s):
                client = self._broker_client()
                return await self._answer(
                    client.post("spawner/start", body, SpawnGrant, repeatable=True, timeout_s=patience_s)
                )
        except RequestError as error:
            self._lease_possible = False
            raise refusal(str(error), error.reason, error.status) from None
        except (BrokerUnavailable, TimeoutError) as error:
            self.log.warning(
                "user=%s server=%s broker unreachable: %s", user, server, str(error) or "no answer in time"
            )
            if needed:
                message = NOT_SET_UP if isinstance(error, NotSetUp) else BROKER_DOWN
                raise refusal(message, "broker_unavailable", 503) from None
            return None

    def _broker_client(self) -> BrokerClient:
        """Return the Hub's connection to the broker.

        Raises:
            NotSetUp: the token cannot be used; the log says why.
        """
        try:
            return connection(
                self.broker_url,
                token=read_token(Path(self.broker_token_file)),
                certificate=self.certificate(),
                timeout_s=self.broker_timeout_s,
            )
        except GpuShareError as error:
            self._tell_administrator(str(error))
            raise NotSetUp(_NOT_SET_UP) from None

    async def _answer(self, request: Awaitable[T]) -> T:
        """Return the broker's answer to ``request``.

        Raises:
            RequestError: the broker refuses the request; the text is for the user.
            BrokerUnavailable: the broker does not answer.
            NotSetUp: the broker refuses this Hub, or does not know the path; the log says why.
        """
        try:
            return await request
        except NotSetUp as error:
            self._tell_administrator(f"{error}: {WRONG_PATH}")
            raise NotSetUp(_NOT_SET_UP) from None
        except RequestError as error:
            if not refuses_hub(error):
                raise
            self._tell_administrator(f"the broker refuses the token in {self.broker_token_file}: {error}")
            raise NotSetUp(_NOT_SET_UP) from None

    def _tell_administrator(self, message: str) -> None:
        """Report a fault of this Hub in its log, and on the broker's admin page and health check."""
        self.log.error(
            "user=%s server=%s no connection to the broker: %s", self.user.name, self.name, message
        )
        report_fault(self.broker_url, message)

    def certificate(self) -> str:
        """Return the certificate that the broker must show; empty if only its unix socket is used.

        Raises:
            GpuShareError: a certificate is needed and not set, or it cannot be used.
        """
        if problem := unverified(self):
            raise GpuShareError(problem)
        path = self.broker_certificate_file
        return read_certificate(Path(path)) if path else ""
