"""`gpushare-docker`: DockerSpawner with GPUs, one container per server.

It adds to the site's configuration what a lease needs inside a container:

| what                     | how                                                                |
|--------------------------|--------------------------------------------------------------------|
| the lease's directory    | mounted under its own path                                         |
| the preload library      | its folder, mounted read-only under its own path                   |
| the broker's unix socket | its folder, mounted read-only under its own path                   |
| the GPUs of the lease    | a device request of Docker for these UUIDs                         |
| no GPU without a lease   | NVIDIA_VISIBLE_DEVICES=void, whatever the image says               |
| one known uid            | `container_uid`, for server and broker alike                       |

All users may share one uid.  They are isolated because no container joins a namespace of the machine or
of another container (pid_namespaces(7): a process cannot see, signal or read processes outside its own).
Settings that join one are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docker.types import DeviceRequest
from dockerspawner import DockerSpawner
from jupyterhub.traitlets import Command
from traitlets import Bool, Callable, Integer, Union, validate

from jupyter_gpushare import channel
from jupyter_gpushare.hub.refusals import SITE_SETTING, SettingRefused, refusal
from jupyter_gpushare.hub.spawner import GPUShareMixin

# Docker's default before it kills a container that it stops (`docker stop`, --time).
_DOCKER_STOP_S = 10
# Names in HostConfig of Docker's API, and in `extra_host_config`.
_NAMESPACES = {
    "PidMode": "pid_mode",
    "IpcMode": "ipc_mode",
    "NetworkMode": "network_mode",
    "UTSMode": "uts_mode",
    "UsernsMode": "userns_mode",
    "CgroupnsMode": "cgroupns",
}


def joins(host_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that join a container to the machine or to another container."""
    for api_name, setting in _NAMESPACES.items():
        for name in (api_name, setting):
            value = str(host_config.get(name) or "")
            if value == "host" or value.startswith(("container:", "ns:")):
                yield f"{setting} = {value!r}"
    for name in ("Privileged", "privileged"):
        if host_config.get(name):
            yield "privileged = True"


class GPUShareDockerSpawner(GPUShareMixin, DockerSpawner):
    """Servers in Docker containers that see the GPUs of their lease only."""

    container_uid = Union(
        [Integer(min=1), Callable()],
        default_value=1000,
        help="""
        User id of the server's processes inside its container and, without user
        namespaces, on the machine. The files of a lease belong to it.

        1000 is the user of the Jupyter Docker Stacks. The container is started with it,
        whatever user the image names. A function of the spawner gives each user a number of
        its own; files in existing volumes keep the number that they have (docs/spawners.md).
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
        ["python3", "-X", "utf8", "-P", "-m", "jupyter_gpushare.job"],
        help="""
        Command that runs a training job in a container, instead of `Spawner.cmd`.

        The image needs this package: its python imports `jupyter_gpushare.job`.
        """,
    ).tag(config=True)

    # From DockerSpawner: a value, or a function of the spawner.
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
            raise SettingRefused(
                "c.DockerSpawner.remove = False cannot be used with GPUs: a container that is started "
                "again has the lease of its last start. Keep users' files in a volume."
            )
        return True

    @validate("extra_host_config")
    def _check_host_config(self, proposal: Any) -> Any:
        if not callable(proposal.value) and (wrong := next(joins(proposal.value), "")):
            raise SettingRefused(
                f"c.DockerSpawner.extra_host_config has {wrong}: with it the servers of users are not "
                "isolated from each other or from the machine. Remove it."
            )
        return proposal.value

    @validate("network_name")
    def _check_network(self, proposal: Any) -> Any:
        if any(joins({"network_mode": proposal.value})):
            raise SettingRefused(
                f"c.DockerSpawner.network_name = {proposal.value!r} puts all servers into one network "
                'namespace: name a network of Docker, such as "bridge".'
            )
        return proposal.value

    def server_uid(self) -> int:
        """Return the uid that the server's processes will have.

        Raises:
            HTTPError: 503, the site's function returns no number, or root's uid; the log says so.
        """
        uid = self.container_uid(self) if callable(self.container_uid) else self.container_uid
        if type(uid) is not int or uid < 1:
            self._tell_administrator(
                f"c.GPUShareDockerSpawner.container_uid gives {uid!r}: a number from 1 on, not async"
            )
            raise refusal(SITE_SETTING, "site_setting", 503)
        return uid

    def get_env(self) -> dict[str, str]:
        """Return the environment, in which the NVIDIA runtime finds only the devices of the lease."""
        env = super().get_env()
        env["NVIDIA_VISIBLE_DEVICES"] = env["CUDA_VISIBLE_DEVICES"] or "void"
        return env

    def lease_mounts(self) -> dict[str, str]:
        """Return the folders of the machine to mount for this start, each with ``ro`` or ``rw``."""
        given = self._environment
        mounts = {}
        if library := given.get("LD_PRELOAD"):
            mounts[str(Path(library).parent)] = "ro"
        if folder := given.get("GPUSHARE_LEASE_DIR"):
            # As root in its container a user could otherwise replace the limit page.
            mounts |= {folder: "ro", f"{folder}/account": "rw"}
        socket = channel.parse(given["GPUSHARE_API_URL"]).socket if "GPUSHARE_API_URL" in given else None
        if socket is not None:
            self._check_alone(socket)
            mounts[str(socket.parent)] = "ro"
        return mounts

    def _check_alone(self, socket: Path) -> None:
        # The folder is mounted, not the socket: a broker that restarts creates a new socket.
        try:
            others = [each.name for each in socket.parent.iterdir() if not each.is_socket()]
        except OSError:  # a Hub that runs in a container may not see the folder
            return
        if others:
            self._tell_administrator(
                f"containers would see {socket.parent / others[0]}, which lies beside the broker's socket: "
                "give c.GPUShareBroker.api_socket a folder of its own"
            )
            raise refusal(SITE_SETTING, "site_setting", 503)

    @property
    def volume_binds(self) -> dict[str, dict[str, str]]:
        """Return the site's volumes and the folders of the lease."""
        ours = {path: {"bind": path, "mode": mode} for path, mode in self.lease_mounts().items()}
        return {**super().volume_binds, **ours}

    def host_settings(self) -> dict[str, Any]:
        """Return the container settings that this start adds to the site's."""
        grant = self._grant
        if grant is None or grant.lease is None or not self.device_requests:
            return {}
        return {
            "device_requests": [
                DeviceRequest(driver="nvidia", device_ids=list(grant.devices), capabilities=[["gpu"]])
            ]
        }

    async def create_object(self) -> Any:
        """Create the container with the settings of this start."""
        site = self.extra_host_config, self.extra_create_kwargs
        host_config = {
            "cgroupns": "private",  # with cgroup v1 the default is the machine's namespace
            **await self._evaluated(self.extra_host_config),
            **self.host_settings(),
        }
        # A function passes the trait's check, so that `docker` refuses it with a text for the user.
        self.extra_host_config = lambda _: host_config
        self.extra_create_kwargs = {
            **await self._evaluated(self.extra_create_kwargs),
            "user": str(self.server_uid()),
        }
        try:
            return await super().create_object()
        finally:
            self.extra_host_config, self.extra_create_kwargs = site

    def docker(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call Docker, but refuse to create a container that joins a namespace.

        Raises:
            HTTPError: 503, a setting of the site joins a namespace; the log names it.
        """
        # Only now are the site's functions and templates evaluated.
        wrong = joins(kwargs["host_config"]) if method == "create_container" else ()
        if settings := ", ".join(wrong):
            self._tell_administrator(
                f"the container would have {settings}, and users could get at each other's servers: remove "
                "it from c.DockerSpawner.extra_host_config, extra_create_kwargs or network_name"
            )
            raise refusal(SITE_SETTING, "site_setting", 503)
        return super().docker(method, *args, **kwargs)

    async def _evaluated(self, setting: Any) -> dict[str, Any]:
        """Return the value of a site's setting, which may be a function of the spawner."""
        value = setting(self) if callable(setting) else setting
        return dict(await value if hasattr(value, "__await__") else value)

    async def stop_object(self) -> None:
        """Stop the container; a job gets its grace period before SIGKILL."""
        if self.stop_grace_s <= _DOCKER_STOP_S:
            await super().stop_object()
            return
        await self.docker("stop", self.container_id, timeout=int(self.stop_grace_s))
