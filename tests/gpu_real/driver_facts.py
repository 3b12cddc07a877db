"""Facts about a driver that this project assumes: each scenario reports one, and judges little.

docs/first-gpu.md says what each answer changes in the code.  All scenarios run on the simulated
driver too, which tests the scenario but proves no fact.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from jupyter_gpushare.gpu.driver.nvml import Nvml
from tests.gpu.machine import GIB, MIB, Client, Worker, until
from tests.gpu_real.direct import checkpoint_of, code_of
from tests.gpu_real.site import CALL_S, PATIENCE_S, ROOT, Site, Skip, do

OTHER_UID = 65534


def a_restore_without_memory_leaves_the_process_in_a_state(site: Site) -> None:
    """Codes and states after a restore that ran out of memory (cuda-checkpoint issue 44)."""
    checkpoint, nvml = checkpoint_of(site), Nvml()
    size = 2 * site.scale_bytes
    site.needs_memory(size)
    before = nvml.free_bytes(site.uuid)
    victim = site.worker("facts", site.lease("restored", size + 2 * GIB, preload=False))
    assert do(victim, "open") == "0"
    assert do(victim, f"alloc {size}") == "0"
    held = before - nvml.free_bytes(site.uuid)  # the list of processes may not say it
    checkpoint.lock(victim.pid, CALL_S)
    checkpoint.checkpoint(victim.pid, CALL_S)
    filler = site.worker("facts", site.lease("filler", site.grantable_bytes, preload=False))
    assert do(filler, "open") == "0"
    step = nvml.free_bytes(site.uuid)
    while nvml.free_bytes(site.uuid) >= held // 4 and step >= MIB:
        if do(filler, f"alloc {step}") != "0":
            step //= 2
    if (left := nvml.free_bytes(site.uuid)) >= held:
        raise Skip(
            f"the device could not be filled: {left / MIB:.0f} MiB stay free of {held / MIB:.0f} needed"
        )
    first = code_of(checkpoint.restore, victim.pid, CALL_S)
    state = checkpoint.state(victim.pid).name
    second = code_of(checkpoint.restore, victim.pid, CALL_S)
    site.end(filler)
    freed = code_of(checkpoint.restore, victim.pid, CALL_S)
    unlock = code_of(checkpoint.unlock, victim.pid)
    site.report.add(
        "restore without memory: code, state, code again, code with memory free again, Unlock",
        f"{first}, {state}, {second}, {freed}, {unlock}",
    )
    site.end(victim)
    assert first != "0", "a restore found memory that was not free"


def _caller(site: Site, environment: Mapping[str, str]) -> Worker:
    """Start a process whose threads have the context, and check every function while it runs."""
    worker = site.worker("calls", environment)
    assert do(worker, "open") == "0"
    assert do(worker, "prepare") == "0"
    return worker


def these_calls_wait_while_a_process_is_locked(site: Site) -> None:
    """Find the functions that block under Lock, and their system calls (`moves.wake`).

    A thread that had the context before the lock calls each: without a context a call answers 201 at once.
    """
    checkpoint = checkpoint_of(site)
    worker = _caller(site, site.lease("locked", 4 * GIB, preload=False))
    unproved = do(worker, "failed")
    checkpoint.lock(worker.pid, CALL_S)
    found = json.loads(do(worker, "blocked 2"))
    checkpoint.unlock(worker.pid)
    waits = ", ".join(f"{name}:{system_call}" for name, system_call in found["waits"].items())
    codes = ", ".join(f"{name} {code}" for name, code in found["answers"].items())
    site.report.add("calls that wait under Lock, with the system call", waits or "none")
    site.report.add("calls that fail under Lock, with the code", codes or "none")
    site.report.add("calls that fail while the process runs, so that nothing is known", unproved)
    site.end(worker)
    assert "cuMemAlloc_v2" in found["waits"]


def these_calls_end_a_process_while_it_is_checkpointed(site: Site) -> None:
    """Find the functions that the driver lets through although their state is in host memory.

    The preload library holds them back, like every call that it counts (native/preload/lease_client.h).
    """
    checkpoint = checkpoint_of(site)
    environment = site.lease("polled", 4 * GIB, preload=False)
    worker = _caller(site, environment)
    ended: list[str] = []
    for name in do(worker, "names").split(","):
        checkpoint.lock(worker.pid, CALL_S)
        checkpoint.checkpoint(worker.pid, CALL_S)
        worker.tell(f"call {name}")
        said = worker.answer(0.3)
        with suppress(subprocess.TimeoutExpired):
            status = worker.process.wait(0.1)
            ended.append(f"{name} ({signal.Signals(-status).name if status < 0 else status})")
            worker = _caller(site, environment)
            continue
        checkpoint.restore(worker.pid, CALL_S)
        checkpoint.unlock(worker.pid)
        assert said or worker.answer(PATIENCE_S)
    site.report.add("calls that end a checkpointed process", ", ".join(ended) or "none")
    site.end(worker)


def a_pool_keeps_what_was_freed(site: Site) -> None:
    """Report the driver's bytes after a free to a pool that keeps memory, and repeat the allocation."""
    size = 2 * site.scale_bytes
    site.needs_memory(size)
    worker = site.worker("facts", site.lease("pool", size + 1 * GIB))
    assert do(worker, "open") == "0"
    before = site.free_bytes()
    if (code := do(worker, f"pool {size}")) != "0":
        raise Skip(f"no memory pools here (code {code})")
    held = before - site.free_bytes()
    code = do(worker, f"again {size}")
    site.report.add(
        f"pool, {size / GIB:.3g} GiB freed: held on the device, the same allocation again",
        f"{held / GIB:.3g} GiB, code {code}",
    )
    site.end(worker)


def a_process_that_only_called_cu_init_is_listed(site: Site) -> None:
    """Report its bytes, and the answers of GetState and Lock (llm-d-rl-time-slicing PR 148)."""
    checkpoint, nvml = checkpoint_of(site), Nvml()
    worker = site.worker("facts", site.lease("initialized", 2 * GIB, preload=False))
    assert do(worker, "init") == "0"
    listed = nvml.processes(site.uuid)
    shown = str(listed[worker.pid]) if worker.pid in listed else "not listed"
    state, lock = code_of(checkpoint.state, worker.pid), code_of(checkpoint.lock, worker.pid, CALL_S)
    if lock == "0":
        checkpoint.unlock(worker.pid)
    site.report.add("cuInit alone: bytes listed, code of GetState, of Lock", f"{shown}, {state}, {lock}")
    site.end(worker)


def entry_points_are_their_symbols(site: Site) -> None:
    """Compare cuGetProcAddress with the symbols of hooks.h: a different address uses a spare hook."""
    worker = site.worker("calls", site.lease("addresses", 2 * GIB, preload=False))
    assert do(worker, "open") == "0"
    found = json.loads(do(worker, "addresses"))
    apart = found["apart"]
    site.report.add(
        "entry points that are no symbol of hooks.h",
        f"{len(apart)} of {found['answered']}" + (f": {', '.join(apart[:20])}" if apart else ""),
    )
    site.end(worker)


def a_new_thread_and_a_new_module_wake(site: Site, command: str) -> None:
    """Test the first call of a thread, and lazy loading, which may bypass the library (cuGetExportTable).

    A call that only synchronizes ends the process if it bypasses the library.
    """
    site.needs_suspending()
    name = f"wake-{command}"
    worker = site.worker("facts", site.lease(name, 4 * GIB))
    assert do(worker, "open") == "0"
    assert do(worker, "prepare") == "0"
    watch = Client(site.socket)
    watch.ask("watch")
    moved = site.ask("suspend", lease=name, calls=site.rests(name))
    assert moved["done"], moved
    worker.tell(command)
    event = watch.event("wanted", name, timeout_s=20.0)
    assert site.ask("resume", lease=name)["done"]
    assert worker.answer(PATIENCE_S) == f"{command} 0"
    counted = event is not None and event["fields"]["queries_only"] == "false"
    how = (
        "a counted call"
        if counted
        else "the net for stalled processes"
        if event
        else "nothing: it would hang"
    )
    site.report.add(f"woken by a new {command} through", how)
    watch.close()
    site.end(worker)
    assert event


def the_host_memory_of_a_checkpoint_has_an_overhead(site: Site) -> None:
    """Report resident memory of the process per checkpointed byte (`leases.host_memory` adds 5 %)."""
    site.needs_suspending()
    size = 4 * site.scale_bytes
    site.needs_memory(size)
    worker = site.worker("facts", site.lease("overhead", size + 2 * GIB))
    assert do(worker, "open") == "0"
    assert do(worker, f"alloc {size}") == "0"
    process = psutil.Process(worker.pid)
    before = process.memory_info().rss
    moved = site.ask("suspend", lease="overhead", calls=site.rests("overhead"))
    if moved["refused"] == "host_memory":
        raise Skip(moved["reason"])
    assert moved["done"], moved
    grown = process.memory_info().rss - before
    assert site.ask("resume", lease="overhead")["done"]
    kept = process.memory_info().rss - before
    site.report.add(
        f"host memory of a suspension of {moved['bytes'] / GIB:.3g} GiB: while asleep, after waking",
        f"{grown / moved['bytes']:.3f} of the bytes, {kept / MIB:.0f} MiB",
    )
    site.end(worker)


def a_process_grows_over_cycles(site: Site) -> None:
    """Report the driver's bytes of a torch process over 20 suspensions (the restore margin)."""
    site.needs_suspending()
    try:
        worker = site.worker("torch", site.lease("cycles", 8 * GIB), 512)
        kind = "torch"
    except (Skip, AssertionError):
        worker = site.worker("driver", site.lease("cycles", 8 * GIB), 512)
        kind = "driver"
    held = [site.used_bytes("cycles")]
    for _ in range(20):
        assert site.ask("suspend", lease="cycles")["done"]
        assert site.ask("resume", lease="cycles")["done"]
        assert do(worker, "check") == "ok"
        held.append(site.used_bytes("cycles"))
    site.report.add(
        f"growth of a {kind} process: in the first cycle, in 20, of",
        f"{(held[1] - held[0]) / MIB:.0f} MiB, {(held[-1] - held[0]) / MIB:.0f} MiB, {held[0] / MIB:.0f} MiB",
    )
    site.end(worker)


LOCK_AS_OTHER = """
import os, sys
from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver import checkpoint
calls = checkpoint.Checkpoint()
os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})
try:
    calls.lock({pid}, 10.0)
    calls.unlock({pid})
    print("code 0")
except DeviceError as error:
    print("code", error.code)
"""


def a_helper_without_root_may_not_lock(site: Site) -> None:
    """Report the code of Lock by a user other than root (cuda-checkpoint issues 6, 25, 41)."""
    checkpoint_of(site)
    if os.geteuid() != 0:
        raise Skip("needs root, to become another user")
    worker = site.worker("facts", site.lease("foreign", 2 * GIB, preload=False))
    assert do(worker, "open") == "0"
    code = LOCK_AS_OTHER.format(uid=OTHER_UID, pid=worker.pid)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**site.environment, "PYTHONPATH": _path(site)}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    site.report.add("Lock by another user", done.stdout.strip() or done.stderr.strip()[-200:])
    site.end(worker)


def _path(site: Site) -> str:
    return os.pathsep.join(filter(None, (str(ROOT), site.environment.get("PYTHONPATH"))))


def killing_a_resumed_process_does_no_harm(site: Site) -> None:
    """Run last: with driver 595.71 the whole machine hung 35 s later (cuda-checkpoint issue 53)."""
    if not site.simulated and os.environ.get("GPUSHARE_TEST_MAY_HANG") != "1":
        raise Skip("may hang the machine: GPUSHARE_TEST_MAY_HANG=1 where its owner agrees")
    site.needs_suspending()
    worker = site.worker("driver", site.lease("killed", 4 * GIB), 256)
    until(lambda: site.sees("killed", worker.pid), "its memory", PATIENCE_S)
    assert site.ask("suspend", lease="killed")["done"]
    assert site.ask("resume", lease="killed")["done"]
    site.end(worker)
    wait_s = 1.0 if site.simulated else 60.0
    time.sleep(wait_s)
    Path("/proc/uptime").read_text()
    site.report.add("a resumed process was killed", f"the machine answers {wait_s:.0f} s later")
