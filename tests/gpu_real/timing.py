"""Measure the driver's delays: until released memory is free, and until a working process is locked.

docs/first-gpu.md says what each answer changes in the code.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from jupyter_gpushare.gpu.driver.nvml import Nvml
from tests.gpu.machine import GIB
from tests.gpu_real.direct import (
    bring_back,
    checkpoint_of,
    code_of,
    lags,
    says,
    state_of,
)
from tests.gpu_real.site import CALL_S, Site, do

# The maximum seconds until memory is shown as free.
FREE_S = 10.0
# The timeout of an impatient Lock.
SHORT_S = 1.0


def lists_and_free_memory_lag_behind(site: Site) -> None:
    """Measure until NVML's list and free memory show what a call, or the end of a process, released."""
    checkpoint, nvml, size = checkpoint_of(site), Nvml(), 4 * site.scale_bytes
    site.needs_memory(size)
    worker = site.worker("held", site.lease("lag", size + 2 * GIB, preload=False))
    pid = worker.pid
    assert do(worker, "open") == "0"

    def shown() -> int:
        return nvml.processes(site.uuid).get(pid) or 0

    def measure(what: str, give_back: Callable[[], object], given_back: int, listed: int) -> None:
        enough = nvml.free_bytes(site.uuid) + given_back * 9 // 10
        give_back()
        took = lags(FREE_S, list=lambda: shown() <= listed, free=lambda: nvml.free_bytes(site.uuid) >= enough)
        process_list = took["list"] if size <= held else "bytes are hidden"
        site.report.add(f"lag after {what}: process list, free memory", f"{process_list}, {took['free']}")

    assert do(worker, f"alloc {size}") == "0"
    held = shown()
    measure("cuMemFree", lambda: do(worker, "free"), size, held - size)
    assert do(worker, f"alloc {size}") == "0"
    if code_of(checkpoint.lock, pid, CALL_S) == "0":
        measure("Checkpoint", lambda: checkpoint.checkpoint(pid, CALL_S), max(held, size), 0)
        bring_back(checkpoint, pid)
    measure("SIGKILL", lambda: os.kill(pid, signal.SIGKILL), max(held, size), 0)
    site.end(worker)


def a_lock_waits_for_a_kernel(site: Site) -> None:
    """Lock with a short and with a long timeout, each while one kernel runs for seconds."""
    checkpoint, kernel_s = checkpoint_of(site), 2.0 if site.simulated else 5.0
    worker = site.worker("held", site.lease("working", 4 * GIB, preload=False))
    pid = worker.pid
    assert do(worker, "open") == "0"
    assert do(worker, "fill 64") == "0"
    for limit_s in (SHORT_S, CALL_S):
        assert do(worker, f"busy {kernel_s}") == "0"
        began = time.monotonic()
        code = code_of(checkpoint.lock, pid, limit_s)
        took_s, state = time.monotonic() - began, state_of(checkpoint, pid)
        undone = bring_back(checkpoint, pid)
        kernel, kept = says(worker, "idle"), says(worker, "verify")
        site.report.add(
            f"Lock within {limit_s:.0f} s, in a kernel of {kernel_s:.0f} s: code, after, state; undone by",
            f"{code}, {took_s:.2f} s, {state}; {undone}; kernel {kernel}, memory {kept}",
        )
        assert (kernel, kept) == ("ok", "ok")
    site.end(worker)
