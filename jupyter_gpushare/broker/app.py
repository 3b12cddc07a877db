"""The broker as a process: configuration, database, device helper, HTTP.

The Hub starts it as a managed service (``gpushare broker --respawn``), or systemd
starts it as an external one.  It takes its address and token from the environment
of a JupyterHub service (``JUPYTERHUB_SERVICE_URL``, ``JUPYTERHUB_API_TOKEN``, ...)
and all other settings from traits.

The Hub's base_url is the path of ``JUPYTERHUB_API_URL`` before ``hub/api``, so an
external service need not configure it separately.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from jupyterhub.services.auth import HubOAuth
from tornado import web
from traitlets import TraitError

from jupyter_gpushare import __version__, channel, messages
from jupyter_gpushare.backends.base import DeviceBackend
from jupyter_gpushare.backends.helper_client import HelperClient, SocketAddress
from jupyter_gpushare.backends.hub import HubClient
from jupyter_gpushare.backends.local import LocalDevices, library_fault
from jupyter_gpushare.broker import respawn as respawning
from jupyter_gpushare.broker.control.announcer import Announcer
from jupyter_gpushare.broker.control.fenced_hub import StartTickets
from jupyter_gpushare.broker.control.loop import Loop
from jupyter_gpushare.broker.control.project_numbers import overrides_text
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.engine.local import LocalEngine
from jupyter_gpushare.broker.http import metrics, routes
from jupyter_gpushare.broker.http.access import Access
from jupyter_gpushare.broker.http.base import Control, OAuthCallback, Service, Site
from jupyter_gpushare.broker.http.handlers import MetricsHandler, NoSuchPathHandler
from jupyter_gpushare.broker.http.listener import ApiListener, Proxies
from jupyter_gpushare.broker.http.pages import AdminPage, DecisionsCsv, UsageCsv
from jupyter_gpushare.broker.http.routes import ROUTES, pattern
from jupyter_gpushare.broker.http.secret_files import secret_file, tls_context
from jupyter_gpushare.broker.http.sockets import Addresses, Sockets
from jupyter_gpushare.broker.respawn import Heartbeat
from jupyter_gpushare.broker.settings import BrokerTraits
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.broker.views.overview import Overview
from jupyter_gpushare.broker.views.views import Views
from jupyter_gpushare.errors import GpuShareError, StoreError, Superseded
from jupyter_gpushare.find_kube import find_kube
from jupyter_gpushare.internal_tls import VARIABLES, internal_tls
from jupyter_gpushare.listener import Gate, connections_allowed
from jupyter_gpushare.procfs import boot_id

log = logging.getLogger("gpushare.broker")

# The process ends within this time after the reason to end; open connections get half of it.
END_S = 2.0


class Cluster(Protocol):
    """The connections of a broker with the engine ``kai`` to its cluster (`kube.broker`)."""

    @property
    def engine(self) -> Engine:
        """The engine that decides."""

    @property
    def devices(self) -> DeviceBackend:
        """The GPUs of all nodes."""

    async def run(self) -> None:
        """Follow the device helpers until cancelled."""

    async def close(self) -> None:
        """Close all connections."""


class GPUShareBroker(BrokerTraits):
    """Decides which user gets which part of which GPU, and stores it."""

    name = "gpushare broker"
    version = __version__
    description = "The broker of jupyter-gpushare: a JupyterHub service."
    examples = """
    # run it (it needs the environment of a JupyterHub service)
    gpushare broker --config jupyterhub_config.py
    # what a managed service runs: it restarts broker and device helper when they end
    gpushare broker --respawn --with-helper --config jupyterhub_config.py
    """

    aliases = {
        "config": "GPUShareBroker.config_file",
        "db-url": "GPUShareBroker.db_url",
        "state-dir": "GPUShareBroker.state_dir",
        "log-level": "Application.log_level",
    }
    flags = {
        "respawn": ({"GPUShareBroker": {"respawn": True}}, "Start the broker again whenever it ends."),
        "with-helper": (
            {"GPUShareBroker": {"with_helper": True}},
            "With --respawn: also keep a device helper running.",
        ),
    }

    def initialize(self, argv: list[str] | None = None) -> None:
        """Read the command line, then the configuration file; the command line wins.

        Raises:
            TraitError: a setting is invalid, or the file is missing or fails.
        """
        self.parse_command_line(argv)
        from_command_line = self.cli_config
        if self.config_file:
            path = Path(self.config_file).absolute()
            if not path.is_file():
                raise TraitError(f"there is no configuration file {path}")
            self.raise_config_file_errors = True  # no broker is better than one with half of its settings
            try:
                self.load_config_file(path.name, path=str(path.parent))
            except Exception as error:  # the site's file may raise anything
                raise TraitError(f"{path}: {type(error).__name__}: {error}") from None
            self.update_config(from_command_line)

    # ---- running -------------------------------------------------------------

    def run(self) -> int:
        """Run until SIGTERM or SIGINT; return the exit status."""
        if self.respawn:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, respawning.RELOAD)
            try:
                addresses = self.addresses()
            except StoreError as error:
                log.critical("%s", error)
                return 1
            return respawning.run(
                addresses,
                state_dir=Path(self.state_dir),
                helper_socket=Path(self.helper_socket) if self.with_helper else None,
                helper_state_dir=Path(self.helper_state_dir),
                arguments=[a for a in self.argv_given if a not in ("--respawn", "--with-helper")],
            )
        try:
            Path(self.state_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            log.critical("the state directory %s cannot be made: %s", self.state_dir, error.strerror)
            return 1
        try:
            return asyncio.run(self._serve())
        except GpuShareError as error:
            log.critical("%s", error)
            return 1

    argv_given: list[str] = []

    def addresses(self) -> Addresses:
        """Return where the broker listens.

        Raises:
            StoreError: the environment is not that of a JupyterHub service.
        """
        url = urlparse(os.environ.get("JUPYTERHUB_SERVICE_URL", ""))
        if not url.port or not os.environ.get("JUPYTERHUB_API_TOKEN"):
            raise StoreError(
                "the broker is a service of JupyterHub: JUPYTERHUB_SERVICE_URL and JUPYTERHUB_API_TOKEN "
                "are not set (see docs/admin.md)"
            )
        host, _, port = self.tls_address.rpartition(":")
        return Addresses(
            url.hostname or "127.0.0.1",
            url.port,
            Path(self.api_socket).absolute(),
            (host.strip("[]"), int(port)) if host else None,
        )

    async def _serve(self) -> int:
        addresses = self.addresses()
        store = Store(self.db_url, boot_id())
        status = await self._serve_with(store, Sockets.take(addresses, os.environ), addresses)
        if status == 0:  # otherwise leave it open as a kill would: on close SQLite syncs the disk twice
            store.close()
        return status

    async def _serve_with(self, store: Store, sockets: Sockets, addresses: Addresses) -> int:
        registry = Registry(store, self.policy(), clock=time.monotonic)
        registry.load(boot_id())
        hub = HubClient(
            os.environ["JUPYTERHUB_API_URL"],
            os.environ["JUPYTERHUB_API_TOKEN"],
            tls=internal_tls(os.environ),
        )
        cluster = await self._cluster(store) if self.engine == "kai" else None
        local = SocketAddress(Path(self.helper_socket))
        devices = cluster.devices if cluster else LocalDevices(HelperClient(local, lambda: store.epoch))
        announcer = Announcer(self.receivers())
        engine = cluster.engine if cluster else LocalEngine()
        tickets = StartTickets(lambda: store.epoch, self._spawner_tokens())
        loop = Loop(registry, engine, devices, hub, tickets, announcer)
        if cluster is None:
            loop.faults.check(library_fault)
        service = self._service(loop, sockets.inherited)
        application = self._application(service)
        servers = self._listen(application, service.gate, sockets, self._proxy_tls())
        log.info(
            "broker %s epoch=%d answers at %s and %s",
            *(__version__, store.epoch, os.environ["JUPYTERHUB_SERVICE_URL"], addresses.path),
        )
        for sentence in overrides_text(registry):
            log.warning("%s", sentence)
        if not sockets.inherited:
            log.warning("the broker bound its port itself: run it with --respawn, or by a systemd socket")
        # The present objects stay, and a full collection over all of them takes longer than a round.
        gc.collect()
        gc.freeze()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        alive = Heartbeat(os.environ)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload, service, alive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, respawning.RELOAD)
        parts = (alive, loop, loop.engine, announcer, *((cluster,) if cluster else ()))
        running = [asyncio.create_task(part.run()) for part in parts]
        status = await _reason_to_end(stopped, (*running, registry.journal.failed))
        for task in running:
            task.cancel()
        closing = (*(server.end() for server in servers), (cluster or devices).close(), hub.close())
        await asyncio.wait([*running, *map(asyncio.create_task, closing)], timeout=END_S / 2)
        return status

    async def _cluster(self, store: Store) -> Cluster:
        """Return the configured cluster.

        Raises:
            GpuShareError: the settings, the cluster or the installation lack something; the text says what.
        """
        cluster: Cluster = await find_kube("broker").connect(self, self.policy(), lambda: store.epoch)
        return cluster

    def _reload(self, service: Service, alive: Heartbeat) -> None:
        """Read the configuration file and the spawner's token again; change nothing if they are invalid."""
        alive.systemd.reloading()
        try:
            fresh = GPUShareBroker()
            fresh.initialize(self.argv_given)
            policy, tokens = fresh.policy(), tuple(fresh._spawner_tokens())
            registry, effects = service.control.registry, service.control.requests.effects
            service.access.spawner_tokens = effects.tickets.tokens = tokens
            registry.policy, registry.lending_switch.configured = policy, policy.lending
            registry.changed.set()
            effects.announcer.receivers = fresh.receivers()
        except (TraitError, GpuShareError, SystemExit) as error:  # traitlets logs a bad value and exits
            log.error("the settings stay as they were: %s", error)
        else:
            log.info(
                "the settings were read again; docs/operations.md names those that change at a restart only"
            )
        alive.systemd.ready()

    def _proxy_tls(self) -> ssl.SSLContext | None:
        """Return the TLS context for the Hub's proxy, or None for plain HTTP, as the service's URL says."""
        if urlparse(os.environ["JUPYTERHUB_SERVICE_URL"]).scheme != "https":
            return None
        if (context := internal_tls(os.environ, ssl.Purpose.CLIENT_AUTH)) is None:
            raise StoreError(
                "JUPYTERHUB_SERVICE_URL begins with https://, which needs certificates of the Hub "
                f"({', '.join(VARIABLES)}: see docs/operations.md)"
            )
        return context

    def _listen(
        self, application: web.Application, gate: Gate, sockets: Sockets, proxy_tls: ssl.SSLContext | None
    ) -> list[ApiListener]:
        folder = Path(self.state_dir)
        kinds: list[tuple[tuple[socket.socket, ...], ssl.SSLContext | None]]
        if proxy_tls is None:
            kinds = [(sockets.unix + sockets.http, None)]
        else:
            kinds = [(sockets.unix, None), (sockets.http, proxy_tls)]
        if sockets.tls:
            own = tls_context(folder / "api-certificate.pem", folder / "api-key.pem")
            kinds.append((sockets.tls, own))
        listeners = []
        for listening, context in kinds:
            listeners.append(ApiListener(application, gate, Proxies.at(self.proxies), ssl_options=context))
            listeners[-1].add_sockets(listening)
        return listeners

    def _service(self, loop: Loop, inherited: bool) -> Service:
        registry = loop.registry
        base_url = hub_base_url(os.environ["JUPYTERHUB_API_URL"])
        prefix = f"{base_url}services/{os.environ.get('JUPYTERHUB_SERVICE_NAME', 'gpushare')}/"
        hub_auth = HubOAuth.instance(
            parent=self, cache_max_age=self.identity_cache_s, base_url=prefix, hub_prefix=f"{base_url}hub/"
        )
        views = Views(registry, loop.engine, loop.faults)
        describe = functools.cache(lambda: routes.describe(prefix))
        return Service(
            control=Control.of(loop),
            views=views,
            overview=Overview(views),
            access=Access(hub_auth, self._spawner_tokens(), loop.hub, loop.ownership),
            site=Site(prefix, describe, metrics.collectors(registry), sockets_inherited=inherited),
            gate=Gate(connections_allowed()),
        )

    def _application(self, service: Service) -> web.Application:
        # The Hub's proxy keeps the Hub's base_url in a path; direct callers of the broker need not know it.
        tops = (service.site.prefix.rstrip("/"), channel.SERVICE_PATH)
        top = f"(?:{'|'.join(map(re.escape, tops))})"
        return web.Application(
            rules(top, service), cookie_secret=self._cookie_secret(), log_function=_log_request
        )

    def _spawner_tokens(self) -> list[str]:
        return secret_file(Path(self.spawner_token_file)).split()

    def _cookie_secret(self) -> bytes:
        return secret_file(Path(self.state_dir) / "cookie-secret").encode()


def rules(top: str, service: Service) -> list[Any]:
    """Return the application's routing rules for all paths of the service below ``top``."""
    options = {"service": service}
    return [
        *((f"{top}/api/v1/{pattern(route)}", route.handler, options) for route in ROUTES),
        (f"{top}/oauth_callback", OAuthCallback, options),
        (f"{top}/metrics", MetricsHandler, options),
        (f"{top}/?", AdminPage, options),
        (f"{top}/decisions.csv", DecisionsCsv, options),
        (f"{top}/usage.csv", UsageCsv, options),
        (".*", NoSuchPathHandler, options),
    ]


def hub_base_url(api_url: str) -> str:
    """Return the Hub's base_url, with a slash at both ends, from the URL of its API."""
    return urlparse(api_url).path.rpartition("hub/api")[0] or "/"


async def _reason_to_end(stopped: asyncio.Event, failing: Iterable[asyncio.Future[None]]) -> int:
    """Return the exit status when ``stopped`` is set or one of ``failing`` has failed.

    `END_S` later the process ends, even if something still waits for a disk, a database, a peer or a
    thread; a broker may be killed at any time.
    """
    errors: list[BaseException] = []

    def note(done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            errors.extend(_leaves(error))
            stopped.set()

    for each in failing:
        each.add_done_callback(note)
    await stopped.wait()
    cause = next((each for each in errors if isinstance(each, Superseded)), errors[0] if errors else None)
    status = 0 if cause is None else respawning.SUPERSEDED_STATUS if isinstance(cause, Superseded) else 1
    limit = threading.Timer(END_S, os._exit, (status,))
    limit.daemon = True
    limit.start()
    if cause is not None:
        log.critical("%s", cause, exc_info=None if isinstance(cause, GpuShareError) else cause)
    return status


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors of a group and of its nested groups."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]


def _log_request(handler: web.RequestHandler) -> None:
    status = handler.get_status()
    if status >= 500:
        log.warning("%s %s answered %d", handler.request.method, handler.request.path, status)


class _Formatter(logging.Formatter):
    """Writes one line per message, no matter which names the message has; tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = messages.printable(record.message)
        return super().formatMessage(record)


def main(argv: list[str]) -> int:
    """Run ``gpushare broker``; return only if the settings are invalid."""
    # A reload that is requested too early waits until the broker can reload.
    signal.pthread_sigmask(signal.SIG_BLOCK, respawning.RELOAD)
    log_handler = logging.StreamHandler(sys.stderr)
    log_handler.setFormatter(_Formatter("[%(levelname).1s %(asctime)s %(name)s] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[log_handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = GPUShareBroker.instance()
    app.argv_given = list(argv)
    try:
        app.initialize(argv)
    except TraitError as error:
        log.critical("%s", error)
        return 1
    status = app.run()
    os._exit(status)  # a thread that waits for a disk or a database must not keep the process alive
