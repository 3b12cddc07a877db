"""The Hub's connection to the broker: the token's file, the pinned certificate, one pool per event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import weakref
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from traitlets.config import LoggingConfigurable

from jupyter_gpushare.channel import api_url
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import GpuShareError, NotSetUp, RequestError
from jupyter_gpushare.private_files import read_private
from jupyter_gpushare.protocol.wire import NOT_THE_SPAWNER, UNVERIFIED_CHANNEL, Health, SpawnFault

if TYPE_CHECKING:
    from jupyterhub.spawner import Spawner as _SpawnerBase
else:
    _SpawnerBase = LoggingConfigurable  # the spawner itself may not be the base of a mixin

T = TypeVar("T")
_NOT_SET_UP = "the Hub's GPU service is not set up (see the Hub's log)"
# What to change where the broker answers 404 to the spawner.
WRONG_PATH = (
    "write c.GPUShareMixin.broker_url without a path (the broker's socket, or https://HOST:PORT), and "
    "restart the broker where it is older than the Hub's jupyter-gpushare"
)
_REPORT_S = 2.0
# A broker that the Hub starts itself comes after the Hub's own start.
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
    """Return whether the broker refuses this Hub itself, and not what a user asks for."""
    return error.reason in (NOT_THE_SPAWNER, UNVERIFIED_CHANNEL)


def report_fault(url: str, message: str) -> None:
    """Begin to tell the administrator, through the broker, why this Hub's spawner cannot work.

    Without a token: over its unix socket the broker knows the Hub by the uid of its process.
    """

    async def report() -> None:
        with contextlib.suppress(GpuShareError):  # the Hub's log has it too
            client = connection(url, token=_UNKNOWN, certificate="", timeout_s=_REPORT_S)
            await client.post("spawner/fault", SpawnFault(message=message), type(None), repeatable=True)

    _begin(report())


def _begin(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _in_background.add(task)
    task.add_done_callback(_in_background.discard)


def check_address(url: str, certificate: str, log: logging.Logger) -> None:
    """Begin to ask what answers at a spawner's address; the log says what to change if it is no broker."""

    async def check() -> None:
        with contextlib.suppress(GpuShareError):  # of a broker that does not run the log tells at each start
            client = BrokerClient(api_url(url), "", certificate=certificate, retry_s=_FIRST_ANSWER_S)
            try:
                await client.get("health", Health)
            except NotSetUp as error:
                log.error("servers with GPUs cannot start: %s: %s", error, WRONG_PATH)
            finally:
                await client.close()

    _begin(check())


def read_token(path: Path) -> str:
    """Return the token in a file that no other user can read; of several lines, the first.

    Raises:
        GpuShareError: there is none, or other users could read or replace it.
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
        GpuShareError: it cannot be read, or other users could replace it.
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
    """Return why the broker of a spawner's configuration cannot be verified, and what to set; empty: it can.

    An authority of the system vouches for a name and not for the broker: whoever can get a certificate
    for that name would get the Hub's token.
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
            RequestError: refused, for a reason the user can read.
            BrokerUnavailable: no answer.
            NotSetUp: the broker refuses this Hub, or has no such path; the log says why.
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

    def _tell_administrator(self, said: str) -> None:
        """Write what keeps this Hub from its broker to the Hub's log, and to the broker's page and health."""
        self.log.error("user=%s server=%s no connection to the broker: %s", self.user.name, self.name, said)
        report_fault(self.broker_url, said)

    def certificate(self) -> str:
        """Return the certificate that the broker must show; empty: it is reached over its unix socket.

        Raises:
            GpuShareError: none is set where one is needed, or it cannot be used.
        """
        if said := unverified(self):
            raise GpuShareError(said)
        path = self.broker_certificate_file
        return read_certificate(Path(path)) if path else ""
