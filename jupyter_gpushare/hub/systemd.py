"""`gpushare-systemd`: SystemdSpawner with GPUs, one transient systemd unit per server.

SystemdSpawner names a unit after the user alone; this class adds the server's name.
"""

from __future__ import annotations

import re
from typing import Any

from systemdspawner import SystemdSpawner
from traitlets import Unicode

from jupyter_gpushare.hub.local import uid_of
from jupyter_gpushare.hub.refusals import refusal
from jupyter_gpushare.hub.spawner import GPUShareMixin

# Names of character devices in /proc/devices: nvidia, nvidiactl, nvidia-uvm, nvidia-caps
# (systemd.resource-control(5), DeviceAllow= takes globs).
_DEVICES = ["char-nvidia* rw", "char-pts rw"]
# Properties of a unit that may hide device files (systemd.exec(5), systemd.resource-control(5)).
_WALLS = frozenset(
    {
        "DeviceAllow",
        "DevicePolicy",
        "InaccessiblePaths",
        "PrivateDevices",
        "RootDirectory",
        "RootImage",
        "Slice",
        "TemporaryFileSystem",
    }
)


def escaped(server: str) -> str:
    """Return a server's name in letters, digits, ``-`` and ``.``, never with the separator ``_``."""
    return re.sub(r"[^A-Za-z0-9-]", lambda found: f".{ord(found[0]):x}.", server)


class SystemdUnits(GPUShareMixin):
    """Mixin in front of SystemdSpawner, or of a class that derives from it."""

    own_uid = True

    # From SystemdSpawner.
    dynamic_users: bool
    isolate_devices: bool
    readonly_paths: list[str] | None
    readwrite_paths: list[str] | None
    unit_extra_properties: dict[str, Any]
    username_template: str

    unit_name_template = Unicode(
        "jupyter-{USERNAME}_{SERVERNAME}",
        help="""
        Name of a server's systemd unit, without `.service`.

        {USERNAME}, {USERID} and {SERVERNAME} are expanded. Without {SERVERNAME} all servers
        of a user would be one unit, and a training job would replace its owner's session:
        the second server of a user is refused.
        """,
    ).tag(config=True)

    def _expand_user_vars(self, string: Any) -> Any:
        if isinstance(string, list):  # a property that is set several times
            return [self._expand_user_vars(each) for each in string]
        return string.format(USERNAME=self.user.name, USERID=self.user.id, SERVERNAME=escaped(self.name))

    def server_uid(self) -> int:
        """Return the user id that the unit runs as.

        Raises:
            HTTPError: 400, the site gives every server a new user id.
        """
        if self.dynamic_users:
            raise refusal(
                "This Hub gives every server a new user id (dynamic_users), which a GPU cannot be tied to. "
                "Tell the administrator.",
                "dynamic_users",
                400,
            )
        return uid_of(self._expand_user_vars(self.username_template))

    def may_gain(self) -> bool:
        """Return whether the unit of a server without a GPU hides nothing that a lease needs."""
        return not self.isolate_devices and self.readonly_paths is None

    def sees_all_gpus(self) -> bool:
        """Return whether no property of the unit may hide a device file."""
        return not (self.isolate_devices or _WALLS & set(self.unit_extra_properties))

    def server_properties(self) -> dict[str, Any]:
        """Return the unit's properties that this start adds to the site's."""
        properties: dict[str, Any] = {}
        grant = self._grant
        if grant is not None and grant.job is not None:
            # systemd sends SIGTERM to the runner alone, which passes it on, and SIGKILL to all processes
            # after the grace period.
            properties |= {"KillMode": "mixed", "TimeoutStopSec": f"{self.stop_grace_s:.0f}s"}
        if grant is not None and grant.lease is not None:
            if self.isolate_devices:
                # These replace PrivateDevices=, which hides the GPUs too.
                properties |= {"DevicePolicy": "closed", "DeviceAllow": list(_DEVICES)}
            if self.readonly_paths is not None:
                properties["ReadWriteDirectories"] = [
                    *(self._expand_user_vars(path) for path in self.readwrite_paths or ()),
                    self._environment["GPUSHARE_LEASE_DIR"],
                ]
        return properties

    async def _start_server(self) -> Any:
        site = self.unit_extra_properties, self.isolate_devices
        properties = self.server_properties()
        # SystemdSpawner writes the expanded values of a start into this dictionary.
        self.unit_extra_properties = {**self.unit_extra_properties, **properties}
        self.isolate_devices = self.isolate_devices and "DevicePolicy" not in properties
        try:
            return await super()._start_server()
        finally:
            self.unit_extra_properties, self.isolate_devices = site


class GPUShareSystemdSpawner(SystemdUnits, SystemdSpawner):
    """Runs servers in systemd units, with the uid of a system user."""
