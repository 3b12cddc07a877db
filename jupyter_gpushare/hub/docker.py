"""`gpushare-docker`: a container for every server, by DockerSpawner.

What a lease needs inside a container is added to the site's configuration here:

| what                     | how                                                                |
|--------------------------|--------------------------------------------------------------------|
| the lease's directory    | mounted under its own path                                         |
| the preload library      | its folder, mounted read-only under its own path                   |
| the broker's unix socket | its folder, mounted read-only under its own path                   |
| the GPUs of the lease    | a device request of Docker for these UUIDs                         |
| no GPU without a lease   | NVIDIA_VISIBLE_DEVICES=void, whatever the image says               |
| pids as the driver's     | the host's pid namespace: driver and library name the same process |
| one known uid            | `container_uid`, for server and broker alike                       |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docker.types import DeviceRequest
from dockerspawner import DockerSpawner
from jupyterhub.traitlets import Command
from traitlets import Bool, Integer, TraitError, validate

from jupyter_gpushare import channel
from jupyter_gpushare.hub.spawner import GPUShareMixin

# Docker's own time to stop a container, in seconds (`docker stop`, --time).
_DOCKER_STOP_S = 10


class GPUShareDockerSpawner(GPUShareMixin, DockerSpawner):
    """Servers in Docker containers that see the GPUs of their lease only."""

    container_uid = Integer(
        1000,
        min=1,
        help="""
        User id of the server's processes inside its container and, without user
        namespaces, on the machine. The files of a lease belong to it.

        1000 is the user of the Jupyter Docker Stacks. The container is started with it,
        whatever user the image names.
        """,
    ).tag(config=True)

    device_requests = Bool(
        True,
        help="""
        Ask Docker for the GPUs of a lease, by UUID (needs the NVIDIA container toolkit).

        Set to False where the containers see the devices without it, as with the
        simulated driver; containers without a lease then see them too.
        """,
    ).tag(config=True)

    job_cmd = Command(
        ["python3", "-P", "-m", "jupyter_gpushare.job"],
        help="""
        Command that runs a training job in a container, instead of `Spawner.cmd`.

        The image needs this package: its python imports `jupyter_gpushare.job`.
        """,
    ).tag(config=True)

    # From DockerSpawner: functions of the spawner are allowed.
    extra_create_kwargs: Any
    extra_host_config: Any

    remove = Bool(
        True,
        help="""
        Remove a container when its server has stopped.

        Must stay True: a container that is started again has the lease of its last start.
        Keep users' files in a volume.
        """,
    ).tag(config=True)

    @validate("remove")
    def _check_remove(self, proposal: Any) -> bool:
        if not proposal.value:
            raise TraitError(
                "c.DockerSpawner.remove = False cannot be used with GPUs: a container that is started "
                "again has the lease of its last start. Keep users' files in a volume."
            )
        return True

    def server_uid(self) -> int:
        return self.container_uid

    def get_env(self) -> dict[str, str]:
        """Return the environment; the NVIDIA runtime gives the container the lease's devices only."""
        env = super().get_env()
        env["NVIDIA_VISIBLE_DEVICES"] = env["CUDA_VISIBLE_DEVICES"] or "void"
        return env

    def lease_mounts(self) -> dict[str, str]:
        """Return the folders of the machine that this start needs, each with ``ro`` or ``rw``."""
        given = self._environment
        mounts = {}
        if library := given.get("LD_PRELOAD"):
            mounts[str(Path(library).parent)] = "ro"
        if folder := given.get("GPUSHARE_LEASE_DIR"):
            mounts[folder] = "rw"
        socket = channel.parse(given["GPUSHARE_API_URL"]).socket if "GPUSHARE_API_URL" in given else None
        if socket is not None:
            mounts[str(socket.parent)] = "ro"
        return mounts

    @property
    def volume_binds(self) -> dict[str, dict[str, str]]:
        """Return the site's volumes and the files of the lease."""
        ours = {path: {"bind": path, "mode": mode} for path, mode in self.lease_mounts().items()}
        return {**super().volume_binds, **ours}

    def host_settings(self) -> dict[str, Any]:
        """Return the settings of the container that this start needs, beside those of the site."""
        grant = self._grant
        if grant is None or grant.lease is None:
            return {}
        settings: dict[str, Any] = {"pid_mode": "host"}
        if self.device_requests:
            settings["device_requests"] = [
                DeviceRequest(driver="nvidia", device_ids=list(grant.devices), capabilities=[["gpu"]])
            ]
        return settings

    async def create_object(self) -> Any:
        """Create the container with the settings of this start."""
        site = self.extra_host_config, self.extra_create_kwargs
        self.extra_host_config = {**await self._evaluated(self.extra_host_config), **self.host_settings()}
        self.extra_create_kwargs = {
            **await self._evaluated(self.extra_create_kwargs),
            "user": str(self.container_uid),
        }
        try:
            return await super().create_object()
        finally:
            self.extra_host_config, self.extra_create_kwargs = site

    async def _evaluated(self, setting: Any) -> dict[str, Any]:
        """Return a setting of the site, which may be a function of the spawner."""
        value = setting(self) if callable(setting) else setting
        return dict(await value if hasattr(value, "__await__") else value)

    async def stop_object(self) -> None:
        """Stop the container; a job gets its grace period before SIGKILL."""
        if self.stop_grace_s <= _DOCKER_STOP_S:
            await super().stop_object()
            return
        # A job's grace period: SIGKILL comes after it.
        await self.docker("stop", self.container_id, timeout=int(self.stop_grace_s))
