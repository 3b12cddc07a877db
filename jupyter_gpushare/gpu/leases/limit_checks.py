"""Check what the broker asks for before a lease is created or changed."""

from __future__ import annotations

import os
from collections.abc import Iterable

from jupyter_gpushare.errors import HelperError, InvalidRequest
from jupyter_gpushare.gpu.driver.nvml import Gpu
from jupyter_gpushare.gpu.leases.files import DEVICES, uuid_bytes
from jupyter_gpushare.protocol.helper import ErrorKind, SetLimit


def check_limits(request: SetLimit, gpus: Iterable[Gpu]) -> None:
    """Return if the limits of a request make sense on these devices.

    Raises:
        InvalidRequest: they do not.
        HelperError: this helper may not write files of that user.
    """
    if request.uid < 0 or (os.geteuid() != 0 and request.uid != os.geteuid()):
        raise HelperError(
            ErrorKind.NOT_ALLOWED,
            f"a helper of uid {os.geteuid()} cannot create files for uid {request.uid}: run it as root",
        )
    if not 1 <= len(request.limits) <= DEVICES:
        raise InvalidRequest(f"a lease has 1 to {DEVICES} devices")
    memory = {gpu.uuid: gpu.memory_bytes for gpu in gpus}
    for uuid, limit_bytes in request.limits.items():
        if uuid not in memory:
            raise InvalidRequest(f"no device {uuid[:80]!r} here")
        uuid_bytes(uuid)
        if not 0 < limit_bytes <= memory[uuid]:
            raise InvalidRequest(f"a limit on {uuid} is 1 to {memory[uuid]} bytes, not {limit_bytes}")
    for uuid, soft_bytes in request.guaranteed.items():
        if not 0 <= soft_bytes <= request.limits.get(uuid, -1):
            raise InvalidRequest(f"guaranteed on {uuid[:80]!r} is 0 to its limit, not {soft_bytes}")
