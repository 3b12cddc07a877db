"""Give a GPU to the kernels of a running server that had none.

All processes of such a server have the name of a lease and the preload library from their start
(`Devices.reserve`).  When the lease exists, the library shows its devices to every process that has
not asked CUDA for devices before.  Running Python kernels get the variables too, because Python
code reads them.  The CUDA runtime keeps its first answer, "no device", so a kernel that has loaded
the driver must be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jupyter_gpushare import procfs

# The variables of a grant that a server without a GPU lacks.
_SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "GPUSHARE_MEMORY_LIMIT",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
# Code for a Python kernel.  It keeps a CUDA_VISIBLE_DEVICES that the user's program has set.
_SET_VARIABLES = """
(lambda env, given: env.update({{
    name: env.get(name) or value if name == "CUDA_VISIBLE_DEVICES" else value for name, value in given.items()
}}))(__import__("os").environ, {given!r})
"""
_DRIVER = "libcuda.so"
_MAPS_TIMEOUT_S = 2.0
# A kernel that is busy longer sets the variables after its cell.
_REPLY_TIMEOUT_S = 1.0


def reserved(environ: Mapping[str, str]) -> str:
    """Return the name of the lease that this server may get while it runs; empty if there is none."""
    handle = environ.get("GPUSHARE_LEASE", "") if environ.get("CUDA_VISIBLE_DEVICES") == "" else ""
    return handle.partition("-")[0]


def shown(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a grant that the server's processes lack."""
    return {name: env[name] for name in _SHOWN if name in env}


async def show(kernel_manager: Any, variables: Mapping[str, str], notebooks: Mapping[str, str]) -> list[str]:
    """Set variables in all kernels; return the names of those that need a restart to see the GPU.

    ``notebooks`` has the paths of notebooks by kernel id.
    """
    kernels = [(id_, kernel_manager.get_kernel(id_)) for id_ in kernel_manager.list_kernel_ids()]
    results = await asyncio.gather(*(_show(kernel, variables) for _, kernel in kernels))
    blind = [(id_, kernel) for (id_, kernel), sees in zip(kernels, results, strict=True) if not sees]
    return [notebooks.get(str(id_)) or str(getattr(kernel, "kernel_name", id_)) for id_, kernel in blind]


async def _show(kernel: Any, variables: Mapping[str, str]) -> bool:
    """Set variables in a kernel; return whether it sees the GPU without a restart."""
    if hasattr(kernel, "update_env"):  # for its next start
        kernel.update_env(env=dict(variables))
    pid = getattr(getattr(kernel, "provisioner", None), "pid", None)
    if not isinstance(pid, int) or await _has_driver(pid):
        return False
    spec = getattr(kernel, "kernel_spec", None)
    if getattr(spec, "language", "") == "python":
        await _set_variables(kernel, variables)
    return True


async def _has_driver(pid: int) -> bool:
    """Return whether a process has loaded the driver, or its maps cannot be read."""
    try:
        async with asyncio.timeout(_MAPS_TIMEOUT_S):
            maps = await asyncio.to_thread(
                Path(procfs.path(pid, "maps")).read_text, encoding="utf-8", errors="replace"
            )
    except (OSError, TimeoutError):
        return True
    return _DRIVER in maps


async def _set_variables(kernel: Any, variables: Mapping[str, str]) -> None:
    """Set variables in a Python kernel; a busy kernel does this after its cell."""
    client = kernel.client()
    client.start_channels(iopub=False, stdin=False, hb=False, control=False)
    try:
        code = _SET_VARIABLES.format(given=dict(variables))
        client.execute(code, silent=True, store_history=False, allow_stdin=False)
        with contextlib.suppress(Exception):  # no reply in time: the request waits in the kernel's queue
            await client.get_shell_msg(timeout=_REPLY_TIMEOUT_S)
    finally:
        client.stop_channels()
