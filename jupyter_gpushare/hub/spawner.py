"""The mixin that gives a server its GPU: asks the broker, puts the answer into the environment.

Rules, each learnt from what JupyterHub does (docs/design of the Hub's spawner):

* A spawner object outlives a failed start: every start assigns everything anew.
* Options are checked at every start; they also come from REST and from last time.
* `start` never waits for a GPU: the broker grants at once or refuses.
* Every refusal is a `SpawnException`, the broker's silence too: only those do not
  count towards the Hub's `consecutive_failure_limit`, whatever their status.
* The lease is given back in `run_post_stop_hook`, which the Hub awaits however a
  server ends; never in `clear_state`, which also runs before a start.
* `poll` never raises (a live server would be forgotten) and needs no broker.
* A job is started only from what the broker returns for this very server, never
  from options, which any user can forge.
"""

from __future__ import annotations

import asyncio
import html
import inspect
import math
import os
import pwd
import re
import stat
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from jupyterhub.scopes import scope_definitions
from jupyterhub.spawner import LocalProcessSpawner, SimpleLocalProcessSpawner, SpawnException
from jupyterhub.traitlets import Command
from traitlets import Float, TraitError, Unicode, default, validate
from traitlets.config import LoggingConfigurable

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, GpuShareError, RequestError
from jupyter_gpushare.hub import options, picker
from jupyter_gpushare.hub.process import KnownProcess
from jupyter_gpushare.wire import GpuRequest, Offers, SpawnGrant, SpawnRequest, SpawnStop, encode

if TYPE_CHECKING:
    from jupyterhub.spawner import Spawner as _Before
else:
    _Before = LoggingConfigurable  # the spawner itself may not be the base of a mixin

# The right to submit jobs, defined by the site (see jupyterhub_config.py).
JOBS_SCOPE = "custom:gpushare:jobs"
# Servers with such names are jobs; the broker alone says what they run.
JOB_SERVER_NAME = re.compile(r"j[a-z0-9]{10}-[0-9]+")
# The runner's own work after its command has ended: killing leftovers, reporting.
_RUNNER_MARGIN_S = 20.0
# A server without GPU waits for the broker only that long.
_NO_GPU_TIMEOUT_S = 2.0
_RELEASE_TIMEOUT_S = 3.0
_MAX_PROJECTS_SHOWN = 8
_TOKEN_MAX_BYTES = 4096

DOWN = (
    "The GPU service does not answer, so no GPU can be given now. "
    'Try again in a minute, or choose "No GPU": such a server starts at once.'
)

# One connection pool per event loop, broker and token; building one costs 20 ms.
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], BrokerClient]]
_clients = weakref.WeakKeyDictionary()


class GPUShareMixin(_Before):
    """Goes before a spawner class: ``class X(GPUShareMixin, LocalProcessSpawner)``."""

    broker_url = Unicode(
        "http://127.0.0.1:8003/services/gpushare",
        help="""
        Address of the broker, seen from the Hub and from the servers, up to and
        including `/services/gpushare`.

        Name the broker itself, not the Hub's proxy: one hop less for every start,
        and servers keep their connection when the proxy restarts.
        """,
    ).tag(config=True)

    broker_token_file = Unicode(
        "",
        help="""
        File with the token that the Hub's spawners show to the broker
        (`GPUShareBroker.spawner_token_file` names the same).

        Only its owner may read it (mode 0600), and it must belong to the Hub's user or
        to root: whoever knows the token can take and end leases of all users.
        """,
    ).tag(config=True)

    broker_timeout_s = Float(
        10.0,
        help="""
        Seconds a start waits for the broker's answer before it is refused.

        Longer survives a slow broker; but a waiting start holds one of the Hub's
        `concurrent_spawn_limit` places. At most half of `Spawner.start_timeout` is used:
        what runs into that one counts as a failure of the Hub.
        """,
    ).tag(config=True)

    offers_timeout_s = Float(
        1.5,
        help="""
        Seconds the spawn page waits for the broker's offers; then it is shown with
        "No GPU" only.

        Longer shows sizes on a busy machine; every visitor waits that long while the
        broker is away.
        """,
    ).tag(config=True)

    job_cmd = Command(
        [sys.executable, "-P", "-m", "jupyter_gpushare.job"],
        help="""
        Command that runs a training job, instead of `Spawner.cmd`.

        Must have this package and the users' programs in its PATH: in an image or
        environment of its own, name that environment's python. Keep `-P`: without it
        a file like `random.py` in a user's home is imported in place of Python's own,
        and every job of that user fails.
        """,
    ).tag(config=True)

    # From the spawner class that this one is combined with.
    cmd: list[str]

    _grant: SpawnGrant | None = None
    # Whether the broker may hold something for this server: after a restart of the Hub, it may.
    _lease_possible = True
    _events: tuple[dict[str, Any], ...] = ()
    _starting = False

    @validate("broker_url")
    def _check_broker_url(self, proposal: Any) -> str:
        url = str(proposal.value).rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TraitError(f"broker_url: {url!r} is not of the form http://host:port/services/gpushare")
        return url

    @validate("broker_timeout_s", "offers_timeout_s")
    def _check_timeout(self, proposal: Any) -> float:
        value = float(proposal.value)
        if not (math.isfinite(value) and 0 < value <= 60):
            raise TraitError(f"{proposal.trait.name}: {value} is not a number of seconds from 0 to 60")
        return value

    @default("server_token_scopes")
    def _default_server_token_scopes(self) -> list[str]:
        # The first two are the Hub's own; the others let the server ask the broker. A site that sets
        # c.Spawner.server_token_scopes itself has to name them all.
        scopes = ["users:activity!user", "access:servers!server", "access:services!service=gpushare"]
        if JOBS_SCOPE in scope_definitions:
            return [*scopes, JOBS_SCOPE]
        # The Hub fails every start that asks for a scope it does not know.
        self.log.warning("no jobs from servers: %s is missing in c.JupyterHub.custom_scopes", JOBS_SCOPE)
        return scopes

    # ---- the broker --------------------------------------------------------------

    def _client(self) -> BrokerClient:
        """Return the Hub's connection to the broker.

        Raises:
            BrokerUnavailable: the token cannot be used; the log says why.
        """
        try:
            token = read_token(Path(self.broker_token_file))
        except GpuShareError as error:
            self.log.error("broker_token_file: %s", error)
            raise BrokerUnavailable("the Hub's GPU service is not set up (see the Hub's log)") from None
        pools = _clients.setdefault(asyncio.get_running_loop(), {})
        key = (self.broker_url, token)
        if key not in pools:
            pools[key] = BrokerClient(f"{self.broker_url}/api/v1", token, timeout_s=self.broker_timeout_s)
        return pools[key]

    def _who(self) -> tuple[str, str, list[str]]:
        return self.user.name, self.name, sorted(group.name for group in self.user.groups)

    def server_uid(self) -> int:
        """Return the uid that the server's processes will have; spawners that change it override this."""
        return os.getuid()

    async def _ask(self, request: GpuRequest | None) -> SpawnGrant | None:
        """Return the broker's grant; None: no GPU, and the broker is silent.

        Raises:
            SpawnException: refused, for a reason the user can read.
        """
        user, server, groups = self._who()
        needed = request is not None or JOB_SERVER_NAME.fullmatch(server) is not None
        try:
            body = SpawnRequest(
                user=user,
                server=server,
                groups=groups,
                uid=self.server_uid(),
                options=request,
                admin=bool(self.user.admin),
            )
            self._lease_possible = True
            patience_s = min(self.broker_timeout_s, self.start_timeout / 2)
            async with asyncio.timeout(patience_s if needed else _NO_GPU_TIMEOUT_S):
                return await self._client().post("spawner/start", body, SpawnGrant, repeatable=True)
        except RequestError as error:
            self._lease_possible = False
            raise refusal(str(error), error.reason, error.status) from None
        except (BrokerUnavailable, TimeoutError) as error:
            self.log.warning(
                "user=%s server=%s broker silent: %s", user, server, str(error) or "no answer in time"
            )
            if needed:
                raise refusal(DOWN, "broker_unavailable", 503) from None
            return None

    # ---- a start -----------------------------------------------------------------

    async def start(self) -> Any:
        """Get the lease, start the server as its holder.

        Raises:
            SpawnException: refused, for a reason the user can read.
        """
        self._grant = None
        self._events = ()
        self._starting = True
        try:
            request = self._requested()
            if request is not None:
                self._tell(10, "Asking for your GPU.")
            grant = await self._ask(request)
            self._grant = grant
            self._set_stop_grace(grant.job.grace_s if grant is not None and grant.job is not None else None)
            if grant is not None and grant.message:
                self._tell(40, grant.message)
            if grant is not None and grant.job is not None:
                return await self._start_job(grant)
            return await super().start()
        finally:
            self._starting = False

    def _requested(self) -> GpuRequest | None:
        try:
            return options.read(self.user_options)
        except RequestError as error:
            self._lease_possible = False
            raise refusal(str(error), error.reason, error.status) from None

    async def _start_job(self, grant: SpawnGrant) -> Any:
        site_cmd = self.cmd
        self.cmd = self.job_cmd
        try:
            return await super().start()
        finally:
            self.cmd = site_cmd

    def get_args(self) -> list[str]:
        # Arguments of the site's notebook server mean nothing to the runner.
        job = self._grant is not None and self._grant.job is not None
        return [] if job else super().get_args()

    def get_env(self) -> dict[str, str]:
        env: dict[str, str] = super().get_env()
        for name in ("GPUSHARE_LEASE", "GPUSHARE_LEASE_DIR", "GPUSHARE_MEMORY_LIMIT", "GPUSHARE_JOB"):
            env.pop(name, None)
        env["GPUSHARE_API_URL"] = f"{self.broker_url}/api/v1"
        grant = self._grant
        if grant is None or grant.lease is None:
            env["CUDA_VISIBLE_DEVICES"] = ""
            return env
        given = dict(grant.env)
        ours, theirs = given.pop("LD_PRELOAD", ""), env.get("LD_PRELOAD", "")
        env.update(given)
        if ours:
            # First, so that a library of the site that looks for the driver finds it through ours.
            env["LD_PRELOAD"] = f"{ours}:{theirs}" if theirs else ours
        if grant.job is not None:
            env["GPUSHARE_JOB"] = encode(grant.job).decode()
            for name in ("JUPYTERHUB_ROOT_DIR", "JUPYTERHUB_DEFAULT_URL"):
                env.pop(name, None)
        return env

    def _tell(self, percent: int, message: str) -> None:
        self._events = (
            *self._events,
            {"progress": percent, "message": message, "html_message": html.escape(message)},
        )

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what happened so far and what happens until `start` has returned, then end."""
        sent = 0
        while True:
            while sent < len(self._events):
                sent += 1
                yield self._events[sent - 1]
            if not self._starting:
                break
            await asyncio.sleep(0.1)
        async for event in super().progress():
            yield event

    # ---- afterwards --------------------------------------------------------------

    async def run_post_stop_hook(self) -> None:
        await self._release()
        result = super().run_post_stop_hook()
        if inspect.isawaitable(result):
            await result

    async def _release(self) -> None:
        """Tell the broker that the server has ended; should it not hear, it compares with the Hub's list."""
        if not self._lease_possible:
            return
        user, server, _ = self._who()
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                stop = SpawnStop(user=user, server=server)
                await self._client().post("spawner/stop", stop, type(None), repeatable=True)
        except (GpuShareError, TimeoutError) as error:
            self.log.warning(
                "user=%s server=%s release not delivered: %s", user, server, str(error) or "no answer in time"
            )
        else:
            self._lease_possible = False

    async def poll(self) -> int | None:
        try:
            status: int | None = await super().poll()
        except Exception:
            # Not knowing must not look like an end: the Hub would forget a live server.
            self.log.exception("poll of %s:%s failed; taken for alive", self.user.name, self.name)
            return None
        return status

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = super().get_state()
        if self._grant is not None and self._grant.job is not None:
            state["gpushare_grace_s"] = self._grant.job.grace_s
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._set_stop_grace(state.get("gpushare_grace_s"))

    def _set_stop_grace(self, grace_s: float | None) -> None:
        self.stop_grace_s = 0.0 if grace_s is None else grace_s + _RUNNER_MARGIN_S

    # ---- the spawn page ----------------------------------------------------------

    async def get_options_form(self) -> str:
        """Return the site's own form, if any, and below it the size picker."""
        site = await super().get_options_form()
        last = self.user_options.get(options.KEY)
        offers, trouble = await self._offers()
        return (site or "") + picker.render(
            offers, last=last if isinstance(last, dict) else {}, trouble=trouble
        )

    async def _offers(self) -> tuple[list[Offers], str]:
        """Return the broker's offers for each project of the user, or why there are none."""
        user, server, groups = self._who()
        known = {"user": user, "group": groups, "server": server}
        try:
            async with asyncio.timeout(self.offers_timeout_s):
                client = self._client()
                first = await client.get("spawner/offers", Offers, params=known)
                others = [p for p in first.projects[:_MAX_PROJECTS_SHOWN] if p != first.project]
                more = await asyncio.gather(
                    *(client.get("spawner/offers", Offers, params={**known, "project": p}) for p in others)
                )
        except RequestError as error:
            return [], str(error)
        except (BrokerUnavailable, TimeoutError) as error:
            self.log.warning("user=%s spawn page without offers: %s", user, str(error) or "no answer in time")
            return [], picker.SILENT
        by_name = {each.project: each for each in (first, *more)}
        return [by_name[name] for name in first.projects if name in by_name] or [first], ""

    async def run_options_from_form(self, form_data: dict[str, Any]) -> dict[str, Any]:
        mine, others = options.split_form(form_data)
        return await self._with_ours(super().run_options_from_form(others), mine)

    async def options_from_query(self, query_data: dict[str, Any]) -> dict[str, Any]:
        mine, others = options.split_form(query_data)
        return await self._with_ours(super().options_from_query(others), mine)

    async def _with_ours(self, site: Any, mine: dict[str, Any]) -> dict[str, Any]:
        found = dict((await site if inspect.isawaitable(site) else site) or {})
        if mine:
            found[options.KEY] = options.from_form(mine)
        return found


def read_token(path: Path) -> str:
    """Return the token in a file that nobody else can read.

    Raises:
        GpuShareError: there is none, or others could read or replace it.
    """
    if not path.name:
        raise GpuShareError("c.GPUShareMixin.broker_token_file is not set")
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            token = file.read(_TOKEN_MAX_BYTES).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise GpuShareError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(about.st_mode) or about.st_mode & 0o077:
        raise GpuShareError(
            f"{path} can be read by others (mode {stat.S_IMODE(about.st_mode):o}): chmod 600 {path}"
        )
    if about.st_uid not in (os.geteuid(), 0):
        raise GpuShareError(f"{path} belongs to uid {about.st_uid}, neither the Hub's user nor root")
    if not token or not token.isprintable():
        raise GpuShareError(f"{path} holds no token")
    return token


def refusal(message: str, reason: str, status: int) -> SpawnException:
    """Return the exception for a start that is refused, readable wherever the Hub shows it."""
    word = re.sub(r"[^a-z0-9_]", "_", reason.lower())[:60] or "refused"
    error = SpawnException(message, reason=word, status_code=status, message_html=html.escape(message))
    # The form page and the page after a failed start read these instead.
    error.jupyterhub_message = message
    error.jupyterhub_html_message = html.escape(message)
    return error


class GPUShareLocalSpawner(GPUShareMixin, KnownProcess, LocalProcessSpawner):
    """Local processes with the uid of the system user of the same name."""

    def server_uid(self) -> int:
        try:
            return pwd.getpwnam(self.user.name).pw_uid
        except KeyError:
            name = self.user.name
            raise refusal(f"There is no system user {name} on this machine.", "no_system_user", 400) from None


class GPUShareSimpleSpawner(GPUShareMixin, KnownProcess, SimpleLocalProcessSpawner):
    """For trying out: all servers have the uid of the Hub, whatever the user's name."""
