"""Spawner mixin: gets a lease from the broker, and puts its grant into the server's environment.

Rules that follow from JupyterHub's behaviour:

* A spawner object survives a failed start, so every start resets all state.
* Options are validated at every start: they also come from the REST API and from
  the Hub's database.
* `start` never waits for a GPU: the broker grants or refuses at once.
* Every refusal, and an unreachable broker, raises `SpawnException`: other
  exceptions count towards the Hub's `consecutive_failure_limit`.
* `run_post_stop_hook` releases the lease: the Hub awaits it however a server ends.
  `clear_state` also runs before a start, so it releases nothing.
* `poll` never raises (the Hub would forget a live server) and needs no broker.
* A job starts only from the broker's grant for this server, never from options,
  which any user can forge.
"""

from __future__ import annotations

import asyncio
import html
import inspect
import math
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from jupyterhub.scopes import scope_definitions
from jupyterhub.traitlets import Command
from traitlets import Float, TraitError, Unicode, default, validate

from jupyter_gpushare import channel
from jupyter_gpushare.errors import BrokerStopped, GpuShareError, RequestError
from jupyter_gpushare.hub import distinct, options
from jupyter_gpushare.hub.compat import SpawnException, keep_failure_count
from jupyter_gpushare.hub.grants import GrantedServer
from jupyter_gpushare.hub.refusals import SHARED_RESOURCE, refusal
from jupyter_gpushare.hub.spawn_page import SpawnPage
from jupyter_gpushare.protocol.wire import GpuRequest, SpawnStop

# Scope that permits submitting jobs, defined by the site (see jupyterhub_config.py).
JOBS_SCOPE = "custom:gpushare:jobs"
_RELEASE_TIMEOUT_S = 3.0


class GPUShareMixin(SpawnPage, GrantedServer):
    """Mixin in front of any spawner class: ``class X(GPUShareMixin, LocalProcessSpawner)``."""

    broker_url = Unicode(
        "http+unix://%2Frun%2Fgpushare-api%2Fapi.sock",
        help="""
        Address of the broker, seen from the Hub: its unix socket (`http+unix://`,
        slashes of the path written as %2F), or `https://HOST:PORT` where the Hub runs
        on another machine. No path follows, whatever the Hub's `base_url` is.

        Plain `http://` is refused: a port belongs to the process that binds it
        first, and that process would get the Hub's token.
        """,
    ).tag(config=True)

    server_broker_url = Unicode(
        "",
        help="""
        Address of the broker, seen from the servers; empty: `broker_url`.

        Servers in containers or on other machines need `https://`, unless the folder
        of the unix socket is mounted there under the same path.
        """,
    ).tag(config=True)

    broker_certificate_file = Unicode(
        "",
        help="""
        File with the certificate that the broker must show over `https://`
        (`api-certificate.pem` in `GPUShareBroker.state_dir`); no other is accepted.

        Needed where `broker_url` or `server_broker_url` is `https://`: without it the
        Hub refuses to start.
        """,
    ).tag(config=True)

    broker_token_file = Unicode(
        "",
        help="""
        File with the token that the Hub's spawners show to the broker
        (`GPUShareBroker.spawner_token_file` names the same).

        Only its owner may read it (mode 0600), and it must belong to the Hub's user or
        to root: the token can take and end leases of all users.
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
        [sys.executable, "-X", "utf8", "-P", "-m", "jupyter_gpushare.job"],
        help="""
        Command that runs a training job, instead of `Spawner.cmd`.

        Must have this package and the users' programs in its PATH: in an image or
        environment of its own, name that environment's python. Keep `-P`: without it
        a file like `random.py` in a user's home is imported in place of Python's own,
        and every job of that user fails. Keep `-X utf8`: without it a locale that is not
        UTF-8 breaks arguments of a job that are not ASCII.
        """,
    ).tag(config=True)

    _stopped_by_hub = False  # False: the server runs, or ended by itself
    _events: tuple[dict[str, Any], ...] = ()

    @validate("broker_url", "server_broker_url")
    def _check_broker_url(self, proposal: Any) -> str:
        name, url = proposal.trait.name, str(proposal.value).rstrip("/")
        if name == "server_broker_url" and not url:
            return url
        try:
            address = channel.parse(url)
        except RequestError as error:
            raise TraitError(f"{name}: {error}") from None
        if not address.is_verified:
            raise TraitError(f"{name}: {url!r} could be any process: use http+unix:// or https://")
        return url

    @validate("broker_timeout_s", "offers_timeout_s")
    def _check_timeout(self, proposal: Any) -> float:
        value = float(proposal.value)
        if not (math.isfinite(value) and 0 < value <= 60):
            raise TraitError(f"{proposal.trait.name}: {value} is not a number of seconds from 0 to 60")
        return value

    @default("server_token_scopes")
    def _default_server_token_scopes(self) -> list[str]:
        # The first two are the Hub's defaults; the others permit calls to the broker.  A site that sets
        # c.Spawner.server_token_scopes must name all of them.
        scopes = ["users:activity!user", "access:servers!server", "access:services!service=gpushare"]
        if JOBS_SCOPE in scope_definitions:
            return [*scopes, JOBS_SCOPE]
        # The Hub fails every start that requests an unknown scope.
        self.log.warning("no jobs from servers: %s is missing in c.JupyterHub.custom_scopes", JOBS_SCOPE)
        return scopes

    # ---- the broker --------------------------------------------------------------

    def server_uid(self) -> int:
        """Return the uid that the server's processes will have; spawners that change it override this."""
        return os.getuid()

    def patience_s(self) -> float:
        """Return the seconds that a start with a GPU waits for the broker's answer."""
        return float(min(self.broker_timeout_s, self.start_timeout / 2))

    def excluded_nodes(self) -> list[str]:
        """Return the nodes of a cluster that this server cannot run on."""
        return []

    def server_resource(self) -> str | None:
        """Return the name of this server's unit, container or pod; None if it is only processes.

        A class that runs servers in something else with a name overrides this: no two servers of a
        user may share it.
        """
        return distinct.resource_name(self)

    def _refuse_shared_resource(self) -> None:
        """Refuse a start that would replace another running server of the user.

        Raises:
            SpawnException: the start is refused; the log says what the administrator has to set.
        """
        others = [each for each in self.user.spawners.values() if each is not self and each.active]
        shared = next((text for other in others if (text := distinct.complaint(self, other))), "")
        if shared:
            self._tell_administrator(shared)
            self._lease_possible = False
            raise refusal(SHARED_RESOURCE, "shared_resource", 409)

    def may_gain(self) -> bool:
        """Return whether a server that starts without a GPU can get one while it runs.

        Its processes need the device helper's lease folders, the preload library and the GPUs' device
        files, under the same paths as the broker.
        """
        return False

    def sees_all_gpus(self) -> bool:
        """Return whether the server's processes can open the device files of all GPUs of the machine.

        Only then can a suspended lease of this server resume on another GPU.
        """
        return False

    # ---- a start -----------------------------------------------------------------

    async def start(self) -> Any:
        """Get a lease and start the server with it.

        Raises:
            SpawnException: the start is refused; the text is for the user.
        """
        self._grant = None
        self._events = ()
        self._asking = True
        self._stopped_by_hub = False
        try:
            await self.prepare_start()
            self._refuse_shared_resource()
            request = self._requested()
            if request is not None:
                self._add_progress(10, "Asking for your GPU.")
            return await self._start_with(await self._ask(request))
        except SpawnException:
            keep_failure_count(self)
            raise
        finally:
            self._asking = False

    async def prepare_start(self) -> None:
        """Apply settings of this server that the broker has to know; subclasses override this."""

    def _requested(self) -> GpuRequest | None:
        try:
            return options.read(self.user_options)
        except RequestError as error:
            self._lease_possible = False
            raise refusal(str(error), error.reason, error.status) from None

    async def _run_apply_user_options(self, user_options: dict[str, Any]) -> None:
        """Apply the site's options; pass ours only to a site's hook, because the Hub would warn of them."""
        if not callable(self.apply_user_options):
            user_options = {name: value for name, value in user_options.items() if name not in options.OWN}
        await super()._run_apply_user_options(user_options)

    def _add_progress(self, percent: int, message: str) -> None:
        self._events = (
            *self._events,
            {"progress": percent, "message": message, "html_message": html.escape(message)},
        )

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield progress events until the broker has answered, then those of the base class."""
        sent = 0
        while True:
            while sent < len(self._events):
                sent += 1
                yield self._events[sent - 1]
            if not self._asking:
                break
            await asyncio.sleep(0.1)
        async for event in super().progress():
            yield event

    # ---- afterwards --------------------------------------------------------------

    async def stop(self, *args: Any, **options: Any) -> Any:
        """Stop the server; the Hub calls this only for one that has not ended by itself."""
        self._stopped_by_hub = True
        return await super().stop(*args, **options)

    async def run_post_stop_hook(self) -> None:
        """Release the lease, then run the site's hook."""
        await self._release()
        result = super().run_post_stop_hook()
        if inspect.isawaitable(result):
            await result

    async def _release(self) -> None:
        """Release the lease; a broker that misses this compares its leases with the Hub's servers later."""
        if not self._lease_possible:
            return
        user, server, _ = self._identity()
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                stop = SpawnStop(
                    user=user,
                    server=server,
                    created=self.user.created,
                    not_nodes=self.excluded_nodes(),
                    by_hub=self._stopped_by_hub,
                )
                client = self._broker_client()
                await self._answer(
                    client.post("spawner/stop", stop, type(None), repeatable=True, await_start=False)
                )
        except BrokerStopped:
            # The Hub stops its services before its servers.  A broker compares its leases with the Hub's
            # list of servers when it starts.
            self.log.info("user=%s server=%s: no broker runs to release the lease", user, server)
        except (GpuShareError, TimeoutError) as error:
            self.log.warning(
                "user=%s server=%s release not delivered: %s", user, server, str(error) or "no answer in time"
            )
        else:
            self._lease_possible = False

    async def poll(self) -> int | None:
        """Return the exit status; None while the server runs or its state is unknown."""
        try:
            status: int | None = await super().poll()
        except Exception:
            # The Hub would forget a live server if a failed poll looked like its end.
            self.log.exception("poll of %s:%s failed; taken for alive", self.user.name, self.name)
            return None
        return status


distinct.check_at_start()
