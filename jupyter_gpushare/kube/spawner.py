"""`gpushare-kube`: KubeSpawner with a pod for each server on the node where its lease has GPUs.

The broker answers once the cluster's scheduler has placed a seat, which takes seconds.  Meanwhile the page
shows the progress.  `pod` applies the answer to the pod.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from jupyterhub.traitlets import Command
from jupyterhub.utils import maybe_future
from kubespawner import KubeSpawner
from traitlets import Dict, Enum, Float, List, Unicode, default

from jupyter_gpushare import channel
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub import options
from jupyter_gpushare.hub.compat import SpawnException
from jupyter_gpushare.hub.refusals import BAD_GRANT, NOT_PLACED, OWN_GPU, SITE_SETTING, refusal
from jupyter_gpushare.hub.spawner import GPUShareMixin
from jupyter_gpushare.kube.pod import (
    NODE_NAME,
    Form,
    PodPlace,
    Runtime,
    adapt,
    escape,
    find_fault,
    find_unisolated,
    is_outside,
    on_node,
)
from jupyter_gpushare.protocol.wire import JOB_SERVER_NAME, GpuRequest, SpawnGrant, SpawnProgress

# A server's next starts skip a node that had no capacity for it, for this time.
_NODE_RETRY_S = 600.0
_POLL_S = 0.2
_PROGRESS_POLL_S = 1.0


class GPUShareKubeSpawner(GPUShareMixin, KubeSpawner):
    """Runs servers in pods that see only the GPUs of their lease."""

    gpu_names = Enum(
        [form.value for form in Form],
        Form.CDI.value,
        help="""
        How containers are told their GPUs: `cdi` (names of CDI in NVIDIA_VISIBLE_DEVICES,
        the default of NVIDIA's GPU operator), `uuid` (the same variable with UUIDs, where
        CDI is off), `annotation` (the operator with its NRI plugin, which needs no runtime class).
        """,
    ).tag(config=True)

    gpu_runtime_class = Unicode(
        "nvidia",
        help="""
        Runtime class of pods with a lease. If empty, they keep that of the site, for example
        where NVIDIA's runtime is the default. Pods without a lease never get it.
        """,
    ).tag(config=True)

    gpu_tolerations = List(
        Dict(),
        [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        help="""
        Tolerations of pods with a lease, in addition to those of `tolerations`.
        """,
    ).tag(config=True)

    host_dirs = List(
        Unicode(),
        ["/run/gpushare", "/var/lib/gpushare"],
        help="""
        Folders of nodes that hold lease directories and the preload library
        (`GPUShareKube.host_dir`); nothing outside of them is mounted into a server.
        """,
    ).tag(config=True)

    holder_timeout = Float(
        30.0,
        help="""
        Seconds that the cluster may take to place a server's pod on the node of its lease.
        After this time the start is refused, because the node lacks CPU or memory for it,
        and the next start gets another node.

        A server without a lease waits for any node as long as KubeSpawner does.
        """,
    ).tag(config=True)

    job_cmd = Command(
        ["python3", "-X", "utf8", "-P", "-m", "jupyter_gpushare.job"],
        help="""
        Command that runs a training job in a pod, instead of `Spawner.cmd`.

        The image needs this package: its python imports `jupyter_gpushare.job`.
        """,
    ).tag(config=True)

    # From KubeSpawner.
    uid: Any
    modify_pod_hook: Any
    delete_grace_period: int
    user_options: dict[str, Any]

    @default("start_timeout")
    def _default_start_timeout(self) -> int:
        return 300  # a seat, an image and a server

    @default("uid")
    def _default_uid(self) -> int:
        return 1000  # of the Jupyter Docker Stacks, and of Zero to JupyterHub

    # When a node may be tried again, by user, server and node.  On the class, because the Hub drops the
    # spawner object of a failed start.
    _avoided: ClassVar[dict[tuple[str, str, str], float]] = {}
    _hub_timeout_s = 0.0  # `start_timeout` when the Hub began to wait for this start

    @property
    def is_job(self) -> bool:
        """Whether this server runs a training job."""
        return JOB_SERVER_NAME.fullmatch(self.name) is not None

    # ---- the request ---------------------------------------------------------

    def server_uid(self) -> int:
        """Return `uid`.

        Raises:
            SpawnException: it is not a number, so the broker cannot use it; the log says so.
        """
        uid = self.uid(self) if callable(self.uid) else self.uid
        if not isinstance(uid, int):
            self._tell_administrator("c.KubeSpawner.uid is a number, or a function (not async) of one")
            raise refusal(SITE_SETTING, "site_setting", 503)
        return uid

    def patience_s(self) -> float:
        """Return half of `start_timeout`, in which the broker waits for a seat.

        A profile may change `start_timeout` later, but the Hub already waits with the site's value.
        """
        return self._hub_timeout_s / 2

    def excluded_nodes(self) -> list[str]:
        """Return the nodes that had no capacity for this server in its last starts."""
        for key in [key for key, until in self._avoided.items() if until < time.monotonic()]:
            del self._avoided[key]
        return sorted(node for user, server, node in self._avoided if (user, server) == self._identity()[:2])

    async def _ask(self, request: GpuRequest | None) -> SpawnGrant | None:
        """Call `GPUShareMixin._ask`; the page meanwhile shows the broker's progress."""
        progress = asyncio.ensure_future(self._show_progress())
        try:
            return await super()._ask(request)
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)

    async def _show_progress(self) -> None:
        (user, server, _), last_message = self._identity(), ""
        while True:
            await asyncio.sleep(_PROGRESS_POLL_S)
            with suppress(GpuShareError):  # the start itself reports the error
                params = {"user": user, "server": server}
                progress = await self._broker_client().get("spawner/start", SpawnProgress, params=params)
                if progress.message not in ("", last_message):
                    last_message = progress.message
                    self._add_progress(25, last_message)

    def take_grant(self, grant: SpawnGrant | None) -> None:
        """Call `GPUShareMixin.take_grant`, and check the node and the mounts of the grant.

        Raises:
            SpawnException: the node has no valid name, or a mount is in none of `host_dirs`; the log
                says which.
        """
        super().take_grant(grant)
        place = self._place()
        if channel.parse(self._environment["GPUSHARE_API_URL"]).socket is not None:
            wrong = "c.GPUShareMixin.broker_url (or server_broker_url) is https:// where servers are pods"
        elif place is None:
            return
        elif not NODE_NAME.fullmatch(place.node):
            wrong = f"a grant may not name the node {place.node[:100]!r}: the broker's engine must be kai"
        elif stray := next((path for path in place.mounts if is_outside(path, self.host_dirs)), ""):
            wrong = f"a grant may not mount {stray[:200]!r}: it is in none of GPUShareKubeSpawner.host_dirs"
        else:
            return
        self._tell_administrator(wrong)
        raise refusal(BAD_GRANT, "bad_grant", 503)

    def _place(self) -> PodPlace | None:
        grant, environment = self._grant, self._environment
        if grant is None or grant.lease is None:
            return None
        mounts = {mount.path: mount.read_only for mount in grant.mounts}
        devices = tuple(environment.get("CUDA_VISIBLE_DEVICES", "").split(","))
        return PodPlace(node=grant.node, devices=devices, mounts=mounts)

    @property
    def _runtime(self) -> Runtime:
        return Runtime(
            form=Form(self.gpu_names),
            runtime_class=self.gpu_runtime_class,
            tolerations=self.gpu_tolerations,
        )

    # ---- the pod -------------------------------------------------------------

    def get_env(self) -> dict[str, Any]:
        """Return the environment, with a job's description escaped so that it reaches the job unchanged."""
        env = super().get_env()
        return env | {name: escape(env[name]) for name in ("GPUSHARE_JOB",) if name in env}

    async def get_pod_manifest(self) -> Any:
        """Return the pod of the site's settings and profile, adapted to its lease."""
        job = self._grant.job if self._grant is not None else None
        pod = await super().get_pod_manifest()
        if job is not None:
            # For deletions by others than the Hub, such as the drain of a node.
            pod.spec.termination_grace_period_seconds = int(self.stop_grace_s)
        return adapt(pod, self._place(), self._runtime)

    async def _checked(self, site_hook: Any, pod: Any) -> Any:
        """Apply the site's hook to a pod, check the pod and return it with the affinity to its node.

        Raises:
            SpawnException: the pod is not isolated, requests GPUs itself or lacks something that its
                lease needs; the log says which.
        """
        if site_hook is not None:
            pod = await maybe_future(site_hook(self, pod))
        plain: Mapping[str, Any] = self.api.api_client.sanitize_for_serialization(pod)
        if setting := find_unisolated(plain):
            self._tell_administrator(
                f"the pod would have {setting}, and users could get at each other's servers: remove it from "
                "c.KubeSpawner, its profile or modify_pod_hook"
            )
            raise refusal(SITE_SETTING, "site_setting", 503)
        if fault := find_fault(plain, self._place(), self._runtime):
            self._tell_administrator(f"{fault}; look at the profile and c.KubeSpawner.modify_pod_hook")
            raise refusal(OWN_GPU, "own_gpu", 409)
        if (place := self._place()) is not None:
            pod.spec.affinity = on_node(plain["spec"].get("affinity"), place.node)
        return pod

    async def prepare_start(self) -> None:
        """Apply the profile, so that the broker gets the same `uid` as the pod."""
        self._hub_timeout_s = float(self.start_timeout)
        with self._home_and_profile():
            await self.load_user_options()

    @contextmanager
    def _home_and_profile(self) -> Iterator[None]:
        """Give a job the home volume and the profile of its owner's default server, in this context."""
        site_options = self.user_options
        if self.is_job:
            own = self.user.spawners[""]
            self.pvc_name = own.pvc_name
            self.user_options = {key: value for key, value in own.user_options.items() if key != options.KEY}
        try:
            yield
        finally:
            self.user_options = site_options

    async def _start_server(self) -> Any:
        """Start the pod; refuse the start if a pod with a lease is not placed within `holder_timeout`."""
        site_hook = self.modify_pod_hook
        self.modify_pod_hook = lambda _, pod: self._checked(site_hook, pod)
        self._start_future = None  # `progress` must not read that of the last start
        # `prepare_start` has applied the profile; a second time could add the same volumes again.
        self.load_user_options = _do_nothing
        try:
            with self._home_and_profile():
                if (place := self._place()) is None:  # any node is fine, even one that is not added yet
                    return await super()._start_server()
                return await self._start_at(place, super()._start_server())
        finally:
            self.modify_pod_hook = site_hook
            del self.load_user_options

    async def _start_at(self, place: PodPlace, start: Coroutine[Any, Any, Any]) -> Any:
        started = asyncio.ensure_future(start)
        placed = asyncio.ensure_future(self._wait_until_placed())
        try:
            await asyncio.wait({started, placed}, return_when=asyncio.FIRST_COMPLETED)
            if not started.done() and not placed.result():
                raise self._not_placed(place)
            return await started
        finally:
            for task in (started, placed):
                task.cancel()
            await asyncio.gather(started, placed, return_exceptions=True)

    async def _wait_until_placed(self) -> bool:
        """Return True once the pod is placed on a node, or False after `holder_timeout`."""
        seen_at: float | None = None
        while True:
            pods = self.pod_reflector.pods if self.pod_reflector is not None else {}
            pod = pods.get(f"{self.namespace}/{self.pod_name}")
            if pod is not None and "deletionTimestamp" not in pod["metadata"]:
                seen_at = time.monotonic() if seen_at is None else seen_at
                if pod["spec"].get("nodeName"):
                    return True
                if time.monotonic() - seen_at > self.holder_timeout:
                    return False
            await asyncio.sleep(_POLL_S)

    def _not_placed(self, place: PodPlace) -> SpawnException:
        self._avoided[*self._identity()[:2], place.node] = time.monotonic() + _NODE_RETRY_S
        self.log.warning("pod %s was not placed on the node %s of its lease", self.pod_name, place.node)
        return refusal(NOT_PLACED, "not_placed", 503)

    async def stop(self, now: bool = False) -> None:
        """Delete the pod; a job gets its grace period before SIGKILL."""
        site_grace_s = self.delete_grace_period
        self.delete_grace_period = max(site_grace_s, int(self.stop_grace_s))
        try:
            await super().stop(now)
        finally:
            self.delete_grace_period = site_grace_s

    async def delete_forever(self) -> None:
        """Delete the server's volume; keep that of a job, which is its owner's home."""
        if not self.is_job:
            await super().delete_forever()


async def _do_nothing() -> None:
    pass
