"""Scenarios that have to pass on every driver, real or simulated.

A scenario takes a `Site`, asserts, and adds its figures to the site's report.  If it
really fills memory, its sizes follow the site's scale.  `order` has the position and
the time limit of each.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint, ProcessState
from jupyter_gpushare.gpu.driver.nvml import DeviceReading, Nvml, XidListener
from jupyter_gpushare.native import build
from tests.gpu.machine import GIB, MIB, Client, until
from tests.gpu_real.overhead import PAIRS, added, in_turn
from tests.gpu_real.site import (
    CALL_S,
    PATIENCE_S,
    ROOT,
    WORKERS,
    Site,
    Skip,
    do,
    need,
    persistence_mode,
    run_program,
    without_library,
)


def the_driver_is_found(site: Site) -> None:
    """Report the driver as the helper's modules see it, without a helper."""
    nvml, checkpoint = Nvml(), Checkpoint()
    site.report.add("driver", nvml.driver)
    site.report.add("checkpoint calls", checkpoint.unavailable or "available")
    for gpu in nvml.gpus:
        usage = nvml.usages(within_s=PATIENCE_S)[gpu.uuid]
        assert isinstance(usage, DeviceReading)
        assert 0 <= usage.used_bytes <= gpu.memory_bytes
        ecc = "not counted" if usage.uncorrected is None else usage.uncorrected
        site.report.add(
            f"{gpu.name} ({gpu.profile or 'whole'})",
            f"{usage.used_bytes / GIB:.2f} of {gpu.memory_bytes / GIB:.1f} GiB, "
            f"uncorrectable errors: {ecc}, island {gpu.island or '-'}, "
            f"persistence mode {persistence_mode(gpu.uuid)}",
        )
    with closing(XidListener(nvml.gpus)) as listener:
        site.report.add("devices that report XIDs", str(len(listener.devices)))
    if not checkpoint.unavailable:
        try:
            answer = f"state {checkpoint.state(4_194_303)}"
        except DeviceError as error:
            answer = str(error)
        assert "state" not in answer, "a process that is not there has one"
        site.report.add("GetState of a process that is not there", answer)


def the_self_test_gives_a_verdict(site: Site) -> None:
    device = site.device
    ladder = ", ".join(f"{r['level']}: {'yes' if r['offered'] else r['reason']}" for r in device["ladder"])
    site.report.add("device", f"{device['name']}, {device['memory_bytes'] / GIB:.1f} GiB")
    site.report.add("ladder", ladder)
    site.report.add("suspendable", f"{device['suspendable']} {device['suspend_reason']}".strip())
    site.report.add("movable", f"{device['movable']} {device['move_reason']}".strip())
    ran = re.findall(r"self-test (uid=\d+ features=\S+)", (site.folder / "helper.log").read_text())
    site.report.add("self-test ran with", ran[-1] if ran else "nothing: helper.log says why")
    if device["suspendable"]:
        rates = device["suspend_bytes_per_s"] / 1e9, device["resume_bytes_per_s"] / 1e9
        site.report.add("self-test, 64 MiB and a context", "{:.2f} GB/s out, {:.2f} GB/s back".format(*rates))
    assert device["level"] in ("preload", "cgroup", "mig") or site.blind


def the_driver_moves_a_process_by_itself(site: Site, gib: int) -> None:
    """Test its calls without the helper, also where the helper's self-test fails."""
    if gib > 1 and site.device["suspendable"]:
        raise Skip("the helper can suspend here, and does so with as much")
    checkpoint, nvml = Checkpoint(), Nvml()
    if checkpoint.unavailable:
        raise Skip(checkpoint.unavailable)
    if site.device["profile"]:
        raise Skip("the driver cannot checkpoint on MIG")
    size = gib * site.scale_bytes
    site.needs_memory(size)
    worker = site.worker("driver", site.lease(f"by-itself-{gib}", size + 2 * GIB))
    assert do(worker, f"fill {size // MIB}") == "0"
    free = nvml.free_bytes(site.uuid)
    began = time.monotonic()
    checkpoint.lock(worker.pid, CALL_S)
    locked = time.monotonic()
    checkpoint.checkpoint(worker.pid, CALL_S)
    parked = time.monotonic()
    assert checkpoint.state(worker.pid) is ProcessState.CHECKPOINTED
    until(lambda: nvml.free_bytes(site.uuid) - free >= size, "its memory is given back", CALL_S)
    given_back = nvml.free_bytes(site.uuid) - free
    halfway = time.monotonic()
    checkpoint.restore(worker.pid, CALL_S)
    restored = time.monotonic()
    checkpoint.unlock(worker.pid)
    assert do(worker, "verify") == "ok"
    site.report.add(
        f"Lock, Checkpoint and Restore of {size / GIB:.3g} GiB",
        f"{1e3 * (locked - began):.0f} ms, {site.rate(size, parked - locked)}, "
        f"{site.rate(size, restored - halfway)}, every byte compared, "
        f"{given_back / GIB:.2f} GiB given back meanwhile",
    )
    site.end(worker)


def a_context_has_its_price(site: Site) -> None:
    worker = site.worker("driver", site.lease("context", 4 * GIB))
    used = site.used_bytes("context")
    assert 0 < used < 2 * GIB
    site.report.add("one context", f"{used / MIB:.0f} MiB")
    site.end(worker)


def memory_comes_back_as_it_was(site: Site, gib: int) -> None:
    """Write, suspend, resume and compare every byte."""
    site.needs_suspending()
    size = gib * site.scale_bytes
    site.needs_memory(size)
    name = f"back-{gib}"
    worker = site.worker("driver", site.lease(name, size + 2 * GIB))
    assert do(worker, f"fill {size // MIB}") == "0"
    moved = site.ask("suspend", lease=name, calls=site.rests(name))
    if moved["refused"] == "host_memory":
        raise Skip(moved["reason"])
    assert moved["done"], moved
    assert moved["bytes"] >= size
    back = site.ask("resume", lease=name)
    assert back["done"], back
    assert do(worker, "verify") == "ok"
    site.report.add(
        f"suspend and resume {size / GIB:.3g} GiB, every byte compared",
        f"{moved['bytes'] / 1e9:.2f} GB out in {site.rate(moved['bytes'], moved['took_s'])}, "
        f"back in {site.rate(back['bytes'], back['took_s'])}",
    )
    site.end(worker)


def the_cpu_works_on_while_the_gpu_is_lent_and_a_call_wakes(site: Site) -> None:
    site.needs_suspending()
    worker = site.worker("driver", site.lease("wake", 4 * GIB), 256)
    watch = Client(site.socket)
    watch.ask("watch")
    assert site.ask("suspend", lease="wake", calls=site.rests("wake"))["done"]
    assert do(worker, "sleep 1") == "0"
    assert watch.event("wanted", "wake", timeout_s=1.0) is None
    asked = time.monotonic()
    worker.tell("check")
    event = watch.event("wanted", "wake")
    assert event
    assert event["fields"]["queries_only"] == "false"
    assert worker.answer(0.2) == ""
    assert site.ask("resume", lease="wake")["done"]
    assert worker.answer(PATIENCE_S) == "check ok"
    site.report.add(
        "CUDA call of a sleeper to its return", f"{time.monotonic() - asked:.2f} s (0.2 s of it waited)"
    )
    watch.close()
    site.end(worker)


def a_lender_gets_its_memory_back_from_a_borrower(site: Site) -> None:
    site.needs_suspending()
    owner = site.worker("driver", site.lease("lender", 12 * GIB), 8 * 1024)
    until(lambda: site.sees("lender", owner.pid), "its memory", PATIENCE_S)
    lent = site.ask("suspend", lease="lender")
    if lent["refused"] == "host_memory":
        raise Skip(lent["reason"])
    assert lent["done"], lent
    # The borrower needs more than was free beside the owner.
    borrower = site.worker("driver", site.lease("borrower", site.grantable_bytes))
    most = min(site.free_bytes(), site.grantable_bytes) - 2 * GIB
    assert do(borrower, f"alloc {most // MIB}") == "0"
    refused = site.ask("resume", lease="lender", timeout_s=0.5)
    assert (refused["done"], refused["refused"]) == (False, "no_memory"), refused
    assert do(borrower, "check") == "ok"
    site.end(borrower)
    back = site.ask("resume", lease="lender")
    assert back["done"], back
    assert do(owner, "check") == "ok"
    site.report.add("lent, restore refused while a borrower is there, returned", "as it was")
    site.end(owner)


def a_limit_holds_for_all_processes_of_a_lease_together(site: Site) -> None:
    site.needs_a_limit()
    environment = site.lease("limit", 6 * GIB)
    first = site.worker("driver", environment, 2048)
    assert do(first, "alloc 8192") == "2"
    second = site.worker("driver", environment)
    assert do(second, "alloc 5120") == "2"
    assert do(second, "alloc 1024") == "0"
    assert [do(first, "check"), do(second, "check")] == ["ok", "ok"]
    site.report.add("two processes, limit 6 GiB", "what goes beyond it together is denied (code 2)")
    if not site.blind:
        until(lambda: site.sees("limit", second.pid), "both are seen", PATIENCE_S)
    site.report.add("what the driver shows of them", site.shown("limit", 6 * GIB))
    site.end(first, second)


def a_process_around_the_library_is_noticed(site: Site) -> None:
    worker = site.worker("driver", site.lease("evader", 2 * GIB, preload=False))
    if site.blind:
        raise Skip(site.blind)
    watch = Client(site.socket)
    watch.ask("watch")
    asked = time.monotonic()
    assert do(worker, "alloc 4096") == "0"
    event = watch.event("over_limit", "evader")
    assert event
    took_s = time.monotonic() - asked
    site.report.add(f"evader noticed (samples every {site.sample_s} s)", f"after {took_s:.2f} s")
    watch.close()
    site.end(worker)


def calls_program(site: Site) -> Path:
    """Compile tests/benchmarks/calls.c into the site's folder; return its path."""
    program = site.folder / "calls"
    source = ROOT / "tests/benchmarks/calls.c"
    run_program([*build.compiler(), "-O2", "-w", "-o", str(program), str(source), "-ldl"], os.environ)
    return program


def call_ns(program: Path, environment: Mapping[str, str], launches: int) -> list[float]:
    """Return the nanoseconds of a launch, of cuMemGetInfo and of dlsym."""
    return [float(word) for word in run_program([str(program), str(launches)], environment).split()]


def what_the_library_adds_to_calls(site: Site) -> None:
    program = calls_program(site)
    leased = site.lease("calls", 4 * GIB)
    plain = without_library(leased)
    launches = 1_000_000 * site.scale_bytes // GIB // PAIRS
    pairs = in_turn(lambda: call_ns(program, plain, launches), lambda: call_ns(program, leased, launches))
    for index, name in enumerate((f"a kernel launch ({PAIRS} times {launches})", "cuMemGetInfo", "dlsym")):
        without, within = (median(run[index] for run in side) for side in zip(*pairs, strict=True))
        assert within > 0
        site.report.add(name, f"{without:.0f} ns, with the library {within:.0f} ns")
    launch = added((without[0], within[0]) for without, within in pairs)
    site.judge("what the library adds to a launch", launch)


def a_kernel_of_jupyter_sleeps_and_is_woken_by_its_cell(site: Site) -> None:
    site.needs_suspending()
    need("jupyter_client")
    need("ipykernel")
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    manager.start_kernel(env=site.lease("kernel", 4 * GIB))
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        worker = json.dumps(str(WORKERS["driver"]))
        setup = f"import runpy; w = runpy.run_path({worker}); code, context = w['init'](); w['alloc'](256)"
        assert run_cell(client, setup) == "ok"
        until(lambda: site.of("kernel")["used_bytes"], "its memory", PATIENCE_S)
        moved = site.ask("suspend", lease="kernel", calls=site.rests("kernel"))
        assert moved["done"], moved
        assert run_cell(client, "1 + 1") == "ok"
        watch = Client(site.socket)
        watch.ask("watch")
        asked = client.execute("assert w['check'](context) == 'ok'")
        assert watch.event("wanted", "kernel")
        assert site.ask("resume", lease="kernel")["done"]
        assert reply_to(client, asked) == "ok"
        watch.close()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
    site.report.add("kernel of jupyter_client", "suspended, a CPU cell ran meanwhile, a GPU cell woke it")


def run_cell(client: Any, source: str) -> str:
    return reply_to(client, client.execute(source))


def reply_to(client: Any, asked: str) -> str:
    while True:
        reply = client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == asked:
            status: str = reply["content"]["status"]
            return status
