"""What a grant changes in a server: its command, variables, memory limit and grace period."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from traitlets import Bool

from jupyter_gpushare import channel
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.hub.broker_access import BrokerAccess
from jupyter_gpushare.hub.refusals import BAD_GRANT, refusal
from jupyter_gpushare.native import PRELOAD_NAME
from jupyter_gpushare.protocol.wire import SpawnGrant, encode_ascii

# ---- the variables that a grant may set in a server
# The Hub, often root, puts the broker's answer into the environment of a user's process.  A broker that
# an attacker controls must not inject code that way.  So the Hub refuses every name and value that
# `ALLOWED` does not have, and a library for LD_PRELOAD that others than root or the Hub's user can change.

_BOOLEAN = "true|false"
# A path without the separators of LD_PRELOAD (blanks, colons) and without "..".  On Kubernetes the file
# name begins with a digest of the library (`native.install_preload`).
_LIBRARY = rf"(/(?!\.\.?/)[^/\s:;$]+)+/([0-9a-f]{{16}}-)?{re.escape(PRELOAD_NAME)}"

ALLOWED: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        name: re.compile(shape)
        for name, shape in {
            "GPUSHARE_LEASE": r"[a-z0-9][a-z0-9-]{0,63}",
            "GPUSHARE_LEASE_DIR": r"(/(?!\.\.?(/|$))[^/\x00-\x1f\x7f]+)+",
            "GPUSHARE_MEMORY_LIMIT": r"[0-9]{1,16}",
            # NVML's UUIDs; older drivers name MIG instances MIG-GPU-<uuid>/<gi>/<ci>.
            "CUDA_VISIBLE_DEVICES": r"((GPU|MIG)-[0-9A-Za-z/-]{1,80}(,(?!$)|$)){1,64}",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "LD_PRELOAD": _LIBRARY,
            "TF_FORCE_GPU_ALLOW_GROWTH": _BOOLEAN,
            "XLA_PYTHON_CLIENT_PREALLOCATE": _BOOLEAN,
        }.items()
    }
)
_MAX_VALUE_LENGTH = 8_192
# Time for the runner to kill descendants and to report, after its command has ended.
_RUNNER_MARGIN_S = 20.0


def checked(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a grant, if all are allowed.

    Raises:
        GpuShareError: a grant may not set a variable, or not to this value.
    """
    for name, value in given.items():
        shape = ALLOWED.get(name)
        if shape is None:
            raise GpuShareError(f"a grant may not set the variable {name[:60]!r}")
        if len(value) > _MAX_VALUE_LENGTH or not shape.fullmatch(value):
            raise GpuShareError(f"a grant may not set {name} to {value[:100]!r}")
    library = Path(given.get("LD_PRELOAD", "/"))
    # A library that is not on this machine is in a container's image.
    if library.is_file() and (why := channel.writer_of(library.resolve(), {0, os.geteuid()})):
        raise GpuShareError(f"{library} may not be loaded into servers: {why}")
    return dict(given)


# ---- host memory -------------------------------------------------------------
# A suspended lease keeps its GPU memory in host memory, which counts towards its server's memory limit.
# The device helper suspends only what fits into the limit (`gpu/leases/host_memory.py`).  Without this
# code a site would have to add the largest GPU size to `mem_limit`, also for users without a GPU.


def saved_bytes(grant: SpawnGrant | None) -> int:
    """Return the bytes of host memory that a lease takes while it is suspended with all its GPU memory."""
    if grant is None or grant.lease is None or any(device.startswith("MIG-") for device in grant.devices):
        return 0  # the driver cannot suspend a process on a MIG instance
    # The device helper adds 5 % too.
    return grant.memory_limit_bytes + grant.memory_limit_bytes // 20


class GrantedServer(BrokerAccess):
    """The part of `GPUShareMixin` that starts a server with its grant."""

    add_gpu_memory_to_mem_limit = Bool(
        True,
        help="""
        Add the GPU memory of a lease, and 5 %, to `mem_limit` of its server.

        That memory is needed while the lease is suspended; while it is not, programs of
        the server can use it as host memory. With False a lease is suspended only where
        its GPU memory fits into `mem_limit` beside what programs use.
        """,
    ).tag(config=True)

    job_cmd: list[str]

    # From the spawner class that this one is combined with.
    mem_limit: int | None
    cmd: list[str]

    _grant: SpawnGrant | None = None
    _environment: dict[str, str] = {}
    _asking = False  # the start waits for the broker's answer

    @abstractmethod
    def _add_progress(self, percent: int, message: str) -> None: ...

    async def _start_with(self, grant: SpawnGrant | None) -> Any:
        """Start the server, or the runner of a job, with its grant.

        Raises:
            SpawnException: the grant sets a variable that it may not set.
        """
        self.take_grant(grant)
        if grant is not None and grant.message:
            self._add_progress(40, grant.message)
        self._asking = False
        if grant is None or grant.job is None:
            return await self._start_server()
        site_cmd = self.cmd
        self.cmd = self.job_cmd
        try:
            return await self._start_server()
        finally:
            self.cmd = site_cmd

    def take_grant(self, grant: SpawnGrant | None) -> None:
        """Use the broker's answer for this start: its variables, and a job's grace period.

        Raises:
            SpawnException: the grant sets a variable that it may not set.
        """
        self._grant = grant
        self._environment = self._checked_environment(grant)
        self._set_stop_grace(grant.job.grace_s if grant is not None and grant.job is not None else None)

    def _checked_environment(self, grant: SpawnGrant | None) -> dict[str, str]:
        """Return the variables that the grant sets.

        Raises:
            SpawnException: the grant sets a variable that it may not set; the log names it.
        """
        api = self.server_broker_url or self.broker_url
        try:
            given = checked(grant.env) if grant is not None else {}
            if api.startswith("https://") and (certificate := self.certificate()):
                given[channel.CERTIFICATE_VARIABLE] = certificate
        except GpuShareError as error:
            self._tell_administrator(str(error))
            raise refusal(BAD_GRANT, "bad_grant", 503) from None
        return {**given, "GPUSHARE_API_URL": channel.api_url(api)}

    async def _start_server(self) -> Any:
        """Start the server as the base class does; its grant is set by now."""
        with self.memory_for_sleep(self._grant):
            return await super().start()

    @contextmanager
    def memory_for_sleep(self, grant: SpawnGrant | None) -> Iterator[None]:
        """Add the GPU memory of a lease to `mem_limit`, if the site sets one, within a ``with`` block."""
        site = self.mem_limit
        if site and self.add_gpu_memory_to_mem_limit:
            self.mem_limit = site + saved_bytes(grant)
        try:
            yield
        finally:
            self.mem_limit = site

    def get_args(self) -> list[str]:
        """Return the arguments of the server, or of the runner if the grant has a job."""
        grant = self._grant
        if grant is None or grant.job is None:
            args: list[str] = super().get_args()
            return args
        # No argument of a notebook server.  The runner hides its environment, so a device helper that
        # is not root finds the lease in this argument (gpu/leases/processes.py).
        return [f"GPUSHARE_LEASE={grant.lease}"]

    def get_env(self) -> dict[str, str]:
        """Return the environment of the server with the variables of its grant."""
        env: dict[str, str] = super().get_env()
        for name in ("GPUSHARE_LEASE", "GPUSHARE_LEASE_DIR", "GPUSHARE_MEMORY_LIMIT", "GPUSHARE_JOB"):
            env.pop(name, None)
        given, grant = dict(self._environment), self._grant
        library, site_libraries = given.pop("LD_PRELOAD", ""), env.get("LD_PRELOAD", "")
        env.update(given)
        if library:
            # First, so that the site's libraries resolve the driver through it.
            env["LD_PRELOAD"] = f"{library}:{site_libraries}" if site_libraries else library
        if grant is None or grant.lease is None:
            return {**env, "CUDA_VISIBLE_DEVICES": ""}
        if grant.job is not None:
            env["GPUSHARE_JOB"] = encode_ascii(grant.job)
            for name in ("JUPYTERHUB_ROOT_DIR", "JUPYTERHUB_DEFAULT_URL"):
                env.pop(name, None)
        return env

    def get_state(self) -> dict[str, Any]:
        """Return the state that the Hub stores, with the grace period of a job."""
        state: dict[str, Any] = super().get_state()
        if self._grant is not None and self._grant.job is not None:
            state["gpushare_grace_s"] = self._grant.job.grace_s
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the state that the Hub stored, with the grace period of a job."""
        super().load_state(state)
        self._set_stop_grace(state.get("gpushare_grace_s"))

    def _set_stop_grace(self, grace_s: float | None) -> None:
        self.stop_grace_s = 0.0 if grace_s is None else grace_s + _RUNNER_MARGIN_S
