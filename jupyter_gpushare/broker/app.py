"""The broker as a process: configuration, database, device helper, HTTP.

Started by the Hub as a managed service (``gpushare broker --respawn``), or by
systemd as an external one.  It takes its address and its token from the
environment of a JupyterHub service (``JUPYTERHUB_SERVICE_URL``,
``JUPYTERHUB_API_TOKEN``, ...), everything else from traits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from jupyterhub.services.auth import HubOAuth, HubOAuthCallbackHandler
from tornado import web
from tornado.netutil import bind_sockets
from traitlets import Bool, Dict, Enum, Float, Integer, List, TraitError, Unicode, default, validate
from traitlets.config import Application

from jupyter_gpushare import __version__
from jupyter_gpushare.backends.hub import HubClient
from jupyter_gpushare.backends.local import HelperClient, LocalBackend
from jupyter_gpushare.broker import metrics, openapi
from jupyter_gpushare.broker import respawn as respawning
from jupyter_gpushare.broker.access import Access
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.desk import Desk
from jupyter_gpushare.broker.forecast import Forecast
from jupyter_gpushare.broker.handlers import ROUTES, Metrics, NoSuchPath, Service, pattern
from jupyter_gpushare.broker.listener import SHARE, Listener, connections_allowed
from jupyter_gpushare.broker.loop import Loop
from jupyter_gpushare.broker.overview import Overview
from jupyter_gpushare.broker.pages import AdminPage, DecisionsCsv
from jupyter_gpushare.broker.policy import Policy, parse_gpus, parse_project
from jupyter_gpushare.broker.spawning import Spawning
from jupyter_gpushare.broker.store import Store
from jupyter_gpushare.broker.terms import Terms
from jupyter_gpushare.broker.views import Views
from jupyter_gpushare.core.model import WHOLE_GPU, Order
from jupyter_gpushare.errors import GpuShareError, InvalidRequest, StoreError

log = logging.getLogger("gpushare.broker")


def boot_id() -> str:
    """Return the id of this boot: monotonic moments of another one mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class GPUShareBroker(Application):
    """Decides who uses which part of which GPU, and remembers it."""

    name = "gpushare broker"
    version = __version__
    description = "The broker of jupyter-gpushare: a JupyterHub service."
    examples = """
    # run it (it needs the environment of a JupyterHub service)
    gpushare broker --config jupyterhub_config.py
    # what a managed service runs: broker and device helper are started again when they end
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

    config_file = Unicode("", help="Configuration file; may be the Hub's own jupyterhub_config.py.").tag(
        config=True
    )
    respawn = Bool(False, help="Run as the parent that starts the broker again within a second.").tag(
        config=True
    )
    with_helper = Bool(
        False, help="With respawn: also keep a device helper running, as the same user (for demos)."
    ).tag(config=True)
    projects = Dict(
        help="""Who is guaranteed what: project name to a dict of

        * ``quota``: guaranteed GPUs, a number (1.5) or a percentage of the machine's GPUs ("50%");
        * ``weight``: share of what is over, 1 by default;
        * ``limit``: hard cap in GPUs, none by default;
        * ``priority``: who is served first among projects below their quota, 0 by default;
        * ``groups``: the Hub groups whose members belong to it, by default the group of the same name.
        """
    ).tag(config=True)
    idle_timeout = Float(
        900.0,
        help="Seconds without a busy kernel and without GPU activity after which a session's GPU may be "
        "lent, if somebody waits. Shorter lends more and wakes more often (see docs/concepts.md).",
    ).tag(config=True)
    adaptive_idle = Bool(
        False,
        help="Learn from the pauses of each session when its GPU may be lent (after 10 min to 4 h), instead "
        "of idle_timeout: sooner where GPUs are many and after a long cell, later where the owner took many "
        "breaks within the last days and was back each time.",
    ).tag(config=True)
    order = Enum(
        [order.value for order in Order if order is not Order.SRTF],
        Order.LAS.value,
        help="By what the jobs of one project are ordered, after their priority: ``las`` (least attained "
        "service: who received least goes first, and may preempt), ``backfill`` (first come first served, "
        "who does not fit is skipped for a while), ``fifo`` (strictly first come first served).",
    ).tag(config=True)
    las_thresholds = List(
        Float(),
        [3250.0, 7200.0],
        help="With order las: the GPU-seconds at which a job enters the next queue; ascending.",
    ).tag(config=True)
    min_run = Float(
        600.0,
        help="Seconds for which a job runs before another one of its project may preempt it. Rooms that are "
        "owed to another project, or to a session's owner, are taken back at any time.",
    ).tag(config=True)
    preempt_cost = Float(
        30.0,
        help="What a preemption costs, in seconds of each GPU that changes hands: not done to gain less.",
    ).tag(config=True)
    guard = Float(
        14 * 86_400.0,
        allow_none=True,
        help="With order las: seconds of waiting after which a job comes before all others; None: never.",
    ).tag(config=True)
    skip_wait = Float(
        86_400.0,
        allow_none=True,
        help="With order backfill: seconds of waiting after which nobody overtakes a job; None: never.",
    ).tag(config=True)
    catch_up = Float(
        1_800.0,
        allow_none=True,
        help="Seconds in which a project with waiting jobs gets what it lags behind its fair share. Shorter "
        "keeps shares closer over a day and preempts more; None: shares are kept at each moment only.",
    ).tag(config=True)
    grace = Float(
        30.0, help="Seconds between SIGTERM and SIGKILL when a job is stopped, unless the job says otherwise."
    ).tag(config=True)
    max_grace = Float(
        120.0,
        help="The most that a job may ask for as its grace: so long may the owner of a lent GPU have to wait "
        "for it.",
    ).tag(config=True)
    min_fraction = Float(
        0.05,
        min=0.001,
        max=1.0,
        help="The smallest part of a GPU that can be asked for; a machine holds 256 leases at most.",
    ).tag(config=True)
    sizes = List(
        Unicode(),
        ["1/4", "1/2", "1"],
        help="Sizes offered on the spawn page, in GPUs, such as 1/4, 0.5, 1 or 2.",
    ).tag(config=True)
    state_dir = Unicode(
        "/var/lib/gpushare", help="Directory of the broker's own files; must not be writable for others."
    ).tag(config=True)
    db_url = Unicode(
        help="SQLAlchemy URL of the broker's database, never the Hub's; default: SQLite in state_dir."
    ).tag(config=True)
    helper_socket = Unicode(help="Unix socket of the device helper; by default in state_dir.").tag(
        config=True
    )
    helper_state_dir = Unicode(
        help="With with_helper: the helper's own files; default: helper/ in state_dir."
    ).tag(config=True)
    spawner_token_file = Unicode(
        help="File (mode 0600) with the token that the Hub's spawner uses; by default spawner-token in "
        "state_dir. It is made when it is missing."
    ).tag(config=True)
    max_jobs = Integer(10_000, min=1, help="Jobs that may wait or run, all users together.").tag(config=True)
    max_jobs_per_user = Integer(1_000, min=1, help="Jobs of one user that may wait or run.").tag(config=True)
    keep_minutes_per_day = Float(
        120.0, help="Minutes a day for which a user may keep an idle GPU from being lent."
    ).tag(config=True)
    identity_cache_s = Integer(
        30, min=1, max=300, help="Seconds for which the Hub's answer about a token is believed."
    ).tag(config=True)

    @default("db_url")
    def _default_db_url(self) -> str:
        return f"sqlite:///{Path(self.state_dir).absolute() / 'broker.sqlite'}"

    @default("helper_socket")
    def _default_helper_socket(self) -> str:
        return str(Path(self.state_dir) / "helper.sock")

    @default("helper_state_dir")
    def _default_helper_state_dir(self) -> str:
        return str(Path(self.state_dir) / "helper")

    @default("spawner_token_file")
    def _default_spawner_token_file(self) -> str:
        return str(Path(self.state_dir) / "spawner-token")

    @validate("las_thresholds")
    def _ascending(self, proposal: Any) -> list[float]:
        values = list(proposal.value)
        if any(value <= 0 for value in values) or sorted(set(values)) != values or len(values) > 16:
            raise TraitError(f"las_thresholds are up to 16 numbers above 0, ascending, not {values}")
        return values

    @validate(
        "idle_timeout",
        "grace",
        "max_grace",
        "keep_minutes_per_day",
        "min_run",
        "preempt_cost",
        "guard",
        "skip_wait",
        "catch_up",
    )
    def _positive(self, proposal: Any) -> float | None:
        if proposal.value is None:
            return None
        value = float(proposal.value)
        if not 0 <= value < 10_000_000:
            raise TraitError(f"{proposal.trait.name} is a number of 0 or more, not {value}")
        return value

    @validate("projects")
    def _known_projects(self, proposal: Any) -> dict[str, Any]:
        try:
            for name, config in proposal.value.items():
                parse_project(name, config)
        except InvalidRequest as error:
            raise TraitError(f"GPUShareBroker.projects: {error}") from None
        return dict(proposal.value)

    @validate("sizes")
    def _known_sizes(self, proposal: Any) -> list[str]:
        try:
            for size in proposal.value:
                parse_gpus(size)
        except InvalidRequest as error:
            raise TraitError(f"GPUShareBroker.sizes: {error}") from None
        return list(proposal.value)

    def initialize(self, argv: list[str] | None = None) -> None:
        """Read the command line, then the configuration file; the command line wins.

        Raises:
            TraitError: a setting is wrong, or the file is missing or cannot be run.
        """
        self.parse_command_line(argv)
        given = self.cli_config
        if self.config_file:
            path = Path(self.config_file).absolute()
            if not path.is_file():
                raise TraitError(f"there is no configuration file {path}")
            self.raise_config_file_errors = True  # rather no broker than one with half of its settings
            try:
                self.load_config_file(path.name, path=str(path.parent))
            except Exception as error:  # whatever the site's file raises
                raise TraitError(f"{path}: {type(error).__name__}: {error}") from None
            self.update_config(given)

    def policy(self) -> Policy:
        """Return the configuration as plain values."""
        sizes = tuple(parse_gpus(size) for size in self.sizes)
        return Policy(
            projects=tuple(parse_project(name, config) for name, config in self.projects.items()),
            idle_timeout_s=self.idle_timeout,
            adaptive_idle=self.adaptive_idle,
            order=Order(self.order),
            las_thresholds_gpu_s=tuple(self.las_thresholds),
            min_run_s=self.min_run,
            preempt_cost_s=self.preempt_cost,
            guard_s=self.guard,
            skip_wait_s=self.skip_wait,
            catch_up_s=self.catch_up,
            grace_s=self.grace,
            max_grace_s=max(self.grace, self.max_grace),
            # What the site offers can be asked for.
            min_fraction_milli=min(round(self.min_fraction * WHOLE_GPU), *(milli for milli, _ in sizes)),
            sizes=sizes,
            max_jobs=self.max_jobs,
            max_jobs_per_user=self.max_jobs_per_user,
            keep_minutes_per_day=self.keep_minutes_per_day,
        )

    # ---- running -------------------------------------------------------------

    def run(self) -> int:
        """Run until told to stop; returns the exit status."""
        if self.respawn:
            return respawning.run(
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

    async def _serve(self) -> int:
        url = urlparse(os.environ.get("JUPYTERHUB_SERVICE_URL", ""))
        if not url.port or not os.environ.get("JUPYTERHUB_API_TOKEN"):
            raise StoreError(
                "the broker is a service of JupyterHub: JUPYTERHUB_SERVICE_URL and JUPYTERHUB_API_TOKEN "
                "are not set (see docs/admin.md)"
            )
        store = Store(self.db_url, boot_id())
        try:
            await self._serve_with(store, url.hostname or "127.0.0.1", url.port)
        finally:
            store.close()
        return 0

    async def _serve_with(self, store: Store, host: str, port: int) -> None:
        book = Book(store, self.policy(), clock=time.monotonic)
        book.load(boot_id())
        backend = LocalBackend(
            HelperClient(Path(self.helper_socket), lambda: store.epoch),
            HubClient(os.environ["JUPYTERHUB_API_URL"], os.environ["JUPYTERHUB_API_TOKEN"]),
        )
        loop = Loop(book, backend)
        forecast = Forecast(book)
        server = self._listen(book, backend, loop, forecast, host, port)
        log.info("broker %s epoch=%d answers at %s:%d", __version__, store.epoch, host, port)
        # What is there now stays: a full collection that looks at all of it takes longer than a round.
        gc.collect()
        gc.freeze()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(part.run()) for part in (loop, forecast)]
                await _until(stopped)
                for task in running:
                    task.cancel()
        except* StoreError as failed:
            raise StoreError(str(failed.exceptions[0])) from None
        finally:
            await server.end()
            await backend.close()

    def _listen(
        self, book: Book, backend: LocalBackend, loop: Loop, forecast: Forecast, host: str, port: int
    ) -> Listener:
        prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX", "/services/gpushare/")
        hub_auth = HubOAuth.instance(parent=self, cache_max_age=self.identity_cache_s)
        terms, views = Terms(book), Views(book, forecast)
        desk = Desk(book, loop.effects, forecast, terms)
        service = Service(
            book=book,
            terms=terms,
            desk=desk,
            spawning=Spawning(book, backend, loop.effects, terms),
            views=views,
            overview=Overview(book, desk, views.moments),
            access=Access(hub_auth, self._spawner_token(), backend),
            registry=metrics.registry(book),
            prefix=prefix,
            openapi=functools.cache(lambda: openapi.describe(prefix)),
            waiting={},
        )
        options = {"service": service}
        api = prefix.rstrip("/") + "/api/v1/"
        application = web.Application(
            [
                *((api + pattern(route), route.handler, options) for route in ROUTES),
                (prefix + "oauth_callback", HubOAuthCallbackHandler),
                (prefix + "metrics", Metrics, options),
                (prefix + "?", AdminPage, options),
                (prefix + "decisions.csv", DecisionsCsv, options),
                (".*", NoSuchPath, options),
            ],
            cookie_secret=self._cookie_secret(),
            log_function=_log_request,
        )
        try:
            sockets = bind_sockets(port, host)
        except OSError as error:
            raise StoreError(
                f"port {port} on {host} is in use ({error.strerror}): stop what listens there, "
                "or change the url of the service gpushare"
            ) from None
        most = connections_allowed()
        server = Listener(application, max_connections=most, max_per_source=max(1, most // SHARE))
        server.add_sockets(sockets)
        return server

    def _spawner_token(self) -> str:
        return secret_file(Path(self.spawner_token_file))

    def _cookie_secret(self) -> bytes:
        return secret_file(Path(self.state_dir) / "cookie-secret").encode()


async def _until(stopped: asyncio.Event) -> None:
    """Return when told to stop, or when the parent that restarts this process is gone."""
    parent = os.environ.get(respawning.PARENT_VARIABLE)
    while not stopped.is_set():
        if parent is not None and os.getppid() != int(parent):
            log.warning("the parent of this broker is gone: ending")
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await stopped.wait()


def secret_file(path: Path) -> str:
    """Return the secret in a file that nobody else can read; it is made when it is missing.

    Raises:
        StoreError: others can read it, or it cannot be made.
    """
    try:
        if not path.exists() or not path.stat().st_size:
            _write_secret(path)
        if path.stat().st_mode & 0o077:
            raise StoreError(f"{path} can be read by others: chmod 600 it")
        return path.read_text().strip()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None


def _write_secret(path: Path) -> None:
    """Make a secret that is there as a whole or not at all; an empty file, of a full disk, is replaced."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(name, path)
        except FileExistsError:
            if not path.stat().st_size:
                os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _log_request(handler: web.RequestHandler) -> None:
    status = handler.get_status()
    if status >= 500:
        log.warning("%s %s answered %d", handler.request.method, handler.request.path, status)


def main(argv: list[str]) -> int:
    """Entry of ``gpushare broker``."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="[%(levelname).1s %(asctime)s %(name)s] %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    app = GPUShareBroker.instance()
    app.argv_given = list(argv)
    try:
        app.initialize(argv)
    except TraitError as error:
        log.critical("%s", error)
        return 1
    return app.run()
