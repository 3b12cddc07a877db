"""Restore a process on another GPU of the same kind (gpuPairs, driver r580).

cuda.h 13.5: the pairs must name every checkpointed GPU.  It does not say whether a visible but unused GPU
counts (NVIDIA/cuda-checkpoint issues 18, 35 and 46).
"""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint, ProcessState
from jupyter_gpushare.gpu.driver.nvml import Nvml
from tests.gpu.machine import GIB, MIB
from tests.gpu_real.direct import bring_back, checkpoint_of, listed, park, says, state_of
from tests.gpu_real.site import CALL_S, Site, Skip, do


def restore(checkpoint: Checkpoint, pid: int, onto: Mapping[str, str]) -> str:
    """Restore with pairs of UUIDs, from old to new; return the code."""
    try:
        checkpoint.restore(pid, CALL_S, onto)
    except DeviceError as error:
        return str(error.code)
    return "0"


def a_process_moves_to_another_gpu(site: Site) -> None:
    """Move there with a pair for the GPU in use, or with pairs for all visible GPUs, and back."""
    checkpoint, nvml, size = checkpoint_of(site), Nvml(), 2 * site.scale_bytes
    first, second = equal_devices(site)
    site.needs_memory(size)
    environment = site.lease("moving", size + 2 * GIB, preload=False)
    worker = site.worker("held", environment | {"CUDA_VISIBLE_DEVICES": f"{first},{second}"})
    assert do(worker, "open") == "0"
    assert do(worker, f"fill {size // MIB}") == "0"
    both, names = {first: second, second: first}, {first: "A", second: "B"}
    for used, other in both.items():
        before, codes = says(worker, "sees"), [park(checkpoint, worker.pid)]
        tries = [("one pair", {used: other}), ("all pairs", both)]
        for what, pairs in tries if used == first else reversed(tries):
            if state_of(checkpoint, worker.pid) == ProcessState.CHECKPOINTED.name:
                codes.append(f"{what} {restore(checkpoint, worker.pid, pairs)}")
        codes.append(bring_back(checkpoint, worker.pid))
        kept, after = says(worker, "verify"), says(worker, "sees")
        shown = [f"{name} {listed(nvml, each, worker.pid)}" for each, name in names.items()]
        what = f"restored from GPU {names[used]} on {names[other]}"
        site.report.add(f"{what}: codes", f"{', '.join(codes)}; memory {kept}")
        seen = f"{before} -> {after}".replace(first, "A").replace(second, "B")
        site.report.add(
            f"{what}: ordinal, UUIDs and buses that it sees, bytes shown", f"{seen}; {', '.join(shown)}"
        )
        assert kept == "ok", codes
        if "pair 0" not in codes[1] and "pairs 0" not in codes[-2]:
            break
    site.end(worker)


def a_process_that_sees_one_gpu_moves_to_another(site: Site) -> None:
    """Move as a session does; report the GPU of a later process with the same variables."""
    checkpoint, nvml, size = checkpoint_of(site), Nvml(), 2 * site.scale_bytes
    first, second = equal_devices(site)
    site.needs_memory(size)
    environment = site.lease("moving-alone", size + 2 * GIB, preload=False)
    worker = site.worker("held", environment)
    assert do(worker, "open") == "0"
    assert do(worker, f"fill {size // MIB}") == "0"
    before, codes = says(worker, "sees"), [park(checkpoint, worker.pid)]
    codes.append(f"the pair {restore(checkpoint, worker.pid, {first: second})}")
    codes.append(bring_back(checkpoint, worker.pid))
    kept, after = says(worker, "verify"), says(worker, "sees")
    what = "it sees GPU A alone, restored on B"
    site.report.add(f"{what}: codes", f"{', '.join(codes)}; memory {kept}")
    shown = f"A {listed(nvml, first, worker.pid)}, B {listed(nvml, second, worker.pid)}"
    seen = f"{before} -> {after}".replace(first, "A").replace(second, "B")
    site.report.add(f"{what}: ordinal, UUIDs and buses that it sees, bytes shown", f"{seen}; {shown}")
    assert kept == "ok", codes
    later = site.worker("held", environment)
    assert do(later, "open") == "0"
    assert do(later, "fill 64") == "0"
    shown = f"A {listed(nvml, first, later.pid)}, B {listed(nvml, second, later.pid)}"
    site.report.add(f"{what}: a process that starts with CUDA_VISIBLE_DEVICES=A", shown)
    site.end(later)
    site.end(worker)


def equal_devices(site: Site) -> tuple[str, str]:
    """Return the site's device and another of the same name and size."""
    for each in site.client.ask("inventory")["devices"]:
        same = [each[key] == site.device[key] for key in ("name", "memory_bytes", "profile")]
        if all(same) and each["uuid"] != site.uuid:
            return site.uuid, each["uuid"]
    raise Skip("there are not two equal devices")
