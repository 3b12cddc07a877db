"""A running server without a GPU gets one: what its kernels need to see it.

All processes of such a server carry the name of a lease from their start, and the preload
library (`Devices.reserve`).  Once the lease exists, the library shows its devices to every process
that has not asked CUDA for devices before; Python code reads the variables, so kernels that run
get these too.  The CUDA runtime keeps its first answer, "no device": a kernel that asked before
has to be restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jupyter_gpushare import procfs

# Those of a grant that a server without a GPU lacks.
_SHOWN = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "GPUSHARE_MEMORY_LIMIT",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)
# What a kernel runs; devices that its program chose among those of the lease stay chosen.
_TAKE = """
(lambda env, given: env.update({{
    name: env.get(name) or value if name == "CUDA_VISIBLE_DEVICES" else value for name, value in given.items()
}}))(__import__("os").environ, {given!r})
"""
_DRIVER = "libcuda.so"
_LOOK_S = 2.0
# A kernel that is busy for longer takes the variables after its cell.
_TELL_S = 1.0


def reserved(environ: Mapping[str, str]) -> str:
    """Return the lease that this server may get while it runs; empty: none."""
    handle = environ.get("GPUSHARE_LEASE", "") if environ.get("CUDA_VISIBLE_DEVICES") == "" else ""
    return handle.partition("-")[0]


def shown(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a grant that the server's processes lack."""
    return {name: env[name] for name in _SHOWN if name in env}


async def show(kernel_manager: Any, variables: Mapping[str, str], notebooks: Mapping[str, str]) -> list[str]:
    """Give variables to all kernels, and return the names of those that see the GPU only after a restart.

    ``notebooks`` has the path of the notebook by kernel id.
    """
    kernels = [(id_, kernel_manager.get_kernel(id_)) for id_ in kernel_manager.list_kernel_ids()]
    sees = await asyncio.gather(*(_show(kernel, variables) for _, kernel in kernels))
    late = [(id_, kernel) for (id_, kernel), does in zip(kernels, sees, strict=True) if not does]
    return [notebooks.get(str(id_)) or str(getattr(kernel, "kernel_name", id_)) for id_, kernel in late]


async def _show(kernel: Any, variables: Mapping[str, str]) -> bool:
    """Return whether a kernel will see the GPU without a restart."""
    if hasattr(kernel, "update_env"):  # for its next start
        kernel.update_env(env=dict(variables))
    pid = getattr(getattr(kernel, "provisioner", None), "pid", None)
    if not isinstance(pid, int) or await _has_driver(pid):
        return False
    spec = getattr(kernel, "kernel_spec", None)
    if getattr(spec, "language", "") == "python":
        await _tell(kernel, variables)
    return True


async def _has_driver(pid: int) -> bool:
    """Return whether a process has loaded the driver; one that cannot be looked at may have."""
    try:
        async with asyncio.timeout(_LOOK_S):
            maps = await asyncio.to_thread(
                Path(procfs.path(pid, "maps")).read_text, encoding="utf-8", errors="replace"
            )
    except (OSError, TimeoutError):
        return True
    return _DRIVER in maps


async def _tell(kernel: Any, variables: Mapping[str, str]) -> None:
    """Set variables in a Python kernel; a busy one does it after its cell."""
    client = kernel.client()
    client.start_channels(iopub=False, stdin=False, hb=False, control=False)
    try:
        code = _TAKE.format(given=dict(variables))
        client.execute(code, silent=True, store_history=False, allow_stdin=False)
        with contextlib.suppress(Exception):  # no answer in time: the message waits at the kernel
            await client.get_shell_msg(timeout=_TELL_S)
    finally:
        client.stop_channels()
