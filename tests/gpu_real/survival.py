"""Test state other than plain memory: does it survive a suspension, and what outlives the process?

docs/first-gpu.md says what each answer changes in the code.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

from jupyter_gpushare.gpu.driver.checkpoint import ProcessState
from jupyter_gpushare.gpu.driver.nvml import Nvml
from tests.gpu.machine import GIB, MIB, Worker
from tests.gpu_real.direct import bring_back, checkpoint_of, lags, listed, mib, move_of, park, says
from tests.gpu_real.site import Site, Skip, do, end

FILLED_MIB = 64
# The seconds for which leftovers of a process are observed, and the maximum until they are free.
OUTLIVES_S = 6.0
FREE_S = 20.0


def asleep(site: Site, name: str, worker: Worker) -> str:
    """Suspend a lease at rest, with driver calls if the helper cannot; return "done ...", or why not."""
    if not site.device["suspendable"]:
        checkpoint = checkpoint_of(site)
        codes = park(checkpoint, worker.pid)
        if codes.endswith(f"({ProcessState.CHECKPOINTED.name})"):
            return "done by the driver's calls"
        return f"by the driver's calls: {codes}, {bring_back(checkpoint, worker.pid)}"
    answer = site.ask("suspend", lease=name, calls=site.rests(name))
    if answer["refused"] == "host_memory":
        raise Skip(answer["reason"])
    return answer["reason"] or "done"


def awake(site: Site, name: str, worker: Worker) -> None:
    """Resume what `asleep` has suspended."""
    if site.device["suspendable"]:
        back = site.ask("resume", lease=name)
        assert back["done"], back
    else:
        codes = bring_back(checkpoint_of(site), worker.pid)
        assert codes.endswith(f"({ProcessState.RUNNING.name})"), codes


def kill(pids: Iterable[int]) -> None:
    """Kill the remaining processes."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children_live_through(
    site: Site, name: str, worker: Worker, children: list[int], free_bytes: int, asked: str
) -> None:
    """Suspend and wake a process with forked children, then kill it while they live.

    ``free_bytes`` were free before it started; ``asked`` is the command that uses the children.
    """
    nvml = Nvml()

    def missing() -> int:
        return free_bytes - nvml.free_bytes(site.uuid)

    try:
        held = missing()
        slept, left = asleep(site, name, worker), missing()
        if slept.startswith("done"):
            awake(site, name, worker)
        after = says(worker, asked)
        site.report.add(
            f"{name}, suspended with {len(children)} forked children: answer, missing meanwhile, after",
            f"{slept}, {mib(left)} of {mib(held)}, {after}",
        )
        end(worker.process)
        back = lags(OUTLIVES_S, free=lambda: missing() < held // 4)["free"]
        left, living = missing(), sum(os.path.exists(f"/proc/{pid}") for pid in children)
        shown = [
            f"{pid_of} {listed(nvml, site.uuid, pid)}"
            for pid, pid_of in [(worker.pid, "the dead process"), *((pid, "a child") for pid in children)]
        ]
        kill(children)
        later = lags(FREE_S, free=lambda: missing() < held // 4)["free"]
        site.report.add(
            f"{name}, killed with forked children alive: free again; later missing, listed; without children",
            f"{back}; {mib(left)} with {living} alive, {', '.join(shown)}; {later}",
        )
    finally:
        kill(children)
    assert after == "ok"


def forked_children_live_through_a_suspension(site: Site) -> None:
    """Test children forked after cuInit, which hold device descriptors (Megatron-LM pull request 3684)."""
    free, size = Nvml().free_bytes(site.uuid), 2 * site.scale_bytes
    site.needs_memory(size)
    worker = site.worker("held", site.lease("children", size + 2 * GIB))
    assert do(worker, "open") == "0"
    assert do(worker, f"fill {size // MIB}") == "0"
    children = [int(pid) for pid in do(worker, "fork 2").split(",")]
    children_live_through(site, "children", worker, children, free, "children")


def a_graph_is_launched_again_after_a_suspension(site: Site) -> None:
    """Launch a graph with a memset and a kernel, instantiated before, before and after a suspension."""
    worker = site.worker("held", site.lease("graph", 2 * GIB))
    assert do(worker, "open") == "0"
    assert do(worker, "graph") == "0"
    works_again(site, "graph", worker, "replay")


def works_again(site: Site, name: str, worker: Worker, asked: str) -> None:
    """Run a command before and after a suspension."""
    move = move_of(site)
    before = do(worker, asked)
    move(site, name, worker)
    after = says(worker, asked)
    how = move.__name__.replace("_", " ")
    site.report.add(f"{name}: {asked} before and after a suspension {how}", f"{before}, {after}")
    site.end(worker)
    assert (before, after) == ("ok", "ok")


def what_the_driver_may_refuse(site: Site, what: str) -> None:
    """Test managed pools, ``__managed__`` and exported handles, with driver calls alone and in a lease."""
    checkpoint, nvml, name = checkpoint_of(site), Nvml(), what.replace("_", "-")
    free = nvml.free_bytes(site.uuid)
    alone = site.worker("held", site.lease(f"alone-{name}", 4 * GIB, preload=False))

    def shown() -> str:
        return f"{listed(nvml, site.uuid, alone.pid)} and {mib(free - nvml.free_bytes(site.uuid))}"

    _fill(alone)
    opened = shown()
    _hold(site, alone, what)
    held = shown()
    codes = f"{park(checkpoint, alone.pid)}, {bring_back(checkpoint, alone.pid)}"
    site.report.add(f"{what}, the driver alone: codes; afterwards", f"{codes}; {_kept(alone)}")
    closed = f", descriptor closed {shown()}" if says(alone, "close") == "0" else ""
    site.report.add(f"{what}: listed and missing from free", f"before {opened}, with it {held}{closed}")
    site.end(alone)
    site.needs_suspending()
    worker = site.worker("held", site.lease(name, 4 * GIB))
    _fill(worker)
    _hold(site, worker, what)
    slept = asleep(site, name, worker)
    if slept == "done":
        awake(site, name, worker)
    kept = _kept(worker)
    site.report.add(f"{what} in a lease: suspension; afterwards", f"{slept}; {kept}")
    site.end(worker)
    assert slept != "done" or kept in ("memory ok, managed ok", "memory ok, managed -"), kept


def _fill(worker: Worker) -> None:
    assert do(worker, "open") == "0"
    assert do(worker, f"fill {FILLED_MIB}") == "0"


def _hold(site: Site, worker: Worker, what: str) -> None:
    if (code := do(worker, f"{what} {site.scale_bytes}")) != "0":
        raise Skip(f"no {what} here (code {code})")


def _kept(worker: Worker) -> str:
    return f"memory {says(worker, 'verify')}, managed {says(worker, 'written')}"
