"""Measure how a driver divides time between processes, and what turns would cost.

Most scenarios imitate turns without the helper and the library, so that they measure the driver.
docs/first-gpu.md says which answer switches turns on by default, and which deletes them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from itertools import zip_longest
from pathlib import Path
from statistics import median

import pynvml

from jupyter_gpushare.native import build
from tests.gpu.machine import GIB, Refused, Worker
from tests.gpu_real.overhead import PAIRS, added, in_turn
from tests.gpu_real.recorder import Recorded
from tests.gpu_real.scenarios import call_ns, calls_program
from tests.gpu_real.site import PATIENCE_S, Site, Skip, do, run_program

MISSING = "this driver has no cuCtxRecordEvent (CUDA 12.5)"
#: Milliseconds of a kernel.
LENGTHS = (1, 10, 100)
TURNS_MS = (20, 50, 100, 200)
#: The work queued when a turn ends, in milliseconds.
AHEAD_MS = (1, 10, 50)
#: The pause between two rounds of a thread that records and waits, in microseconds.
WATCH_US = 1000
#: The part of a device's time that one of two leases is granted; the other has the rest.
QUARTER = 0.25
#: A host computes for so long and pauses as long; kernels of its guest.
HOST_MS, GUEST_MS = 100, 5
NAMES = ("global", "thread local", "relaxed")
# Time slices of `nvidia-smi compute-policy`.
DEFAULT, SHORT, LONG = 0, 1, 3


def _tenants(
    site: Site, count: int, name: str, *, preload: bool = False, shares: tuple[float, ...] = ()
) -> list[Worker]:
    """Start one process per lease with the same kernel; the first finds the size that takes 1 ms."""
    workers: list[Worker] = []
    amount = "0"
    for index, share in zip_longest(range(count), shares):
        worker = site.worker("time", site.lease(f"{name}-{index}", 2 * GIB, preload=preload, share=share))
        code, amount = do(worker, f"open {amount}").split()
        assert code == "0", code
        workers.append(worker)
    return workers


def _told_at_once(commands: dict[Worker, str]) -> list[list[str]]:
    """Run a command in all workers at once; return the words of their answers."""
    for worker, command in commands.items():
        worker.tell(command)
    return [worker.answer(PATIENCE_S).split()[1:] for worker in commands]


def _at_once(commands: dict[Worker, str]) -> list[int]:
    """Return the number of kernels that each has done."""
    return [int(words[0]) for words in _told_at_once(commands)]


def _seconds(site: Site, seconds: float) -> float:
    """Return the seconds of a measurement, fewer on the simulated driver, whose figures prove nothing."""
    return seconds / 10 if site.simulated else seconds


def two_tenants_divide_the_time(site: Site) -> None:
    """Run the same kernels side by side, long beside short ones, and one process against three."""
    workers = _tenants(site, 4, "tenant")
    seconds = _seconds(site, 3.0)
    alone = {ms: ms * _at_once({workers[0]: f"run {ms} {seconds} 0"})[0] for ms in LENGTHS}

    def share(*lengths: int) -> str:
        done = _at_once(
            {worker: f"run {ms} {seconds} 0" for worker, ms in zip(workers, lengths, strict=False)}
        )
        parts = [ms * count / max(1, alone[ms]) for ms, count in zip(lengths, done, strict=True)]
        return f"{', '.join(f'{part:.0%}' for part in parts)}; together {sum(parts):.0%}"

    for lengths in ((1, 1), (10, 10), (100, 100), (1, 100)):
        site.report.add(
            "two processes, kernels of {} and {} ms: of the work of one alone".format(*lengths),
            share(*lengths),
        )
    site.report.add(
        "one process beside three, kernels of 10 ms: of the work of one alone", share(10, 10, 10, 10)
    )
    site.end(*workers)


def the_slice_of_the_driver_can_be_set(site: Site) -> None:
    """Measure a short and a long slice of `nvidia-smi compute-policy`, which apply to the whole device."""
    if shutil.which("nvidia-smi") is None or site.simulated:
        raise Skip("no nvidia-smi")
    if os.environ.get("GPUSHARE_TEST_MAY_SET") != "1":
        raise Skip("changes a setting of the device: GPUSHARE_TEST_MAY_SET=1 where its owner agrees")

    def policy(*words: str) -> str:
        command = ["nvidia-smi", "compute-policy", "-i", site.uuid, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return f"{done.returncode}: {' '.join((done.stdout + done.stderr).split())[-200:]}"

    before = policy("--list")
    site.report.add("nvidia-smi compute-policy --list", before)
    if "default" not in before.lower():
        raise Skip("its slice is not the default one, so it is left as it is")
    workers = _tenants(site, 2, "slice")
    try:
        for name, number in (("default", DEFAULT), ("short", SHORT), ("long", LONG)):
            answer = policy(f"--set-timeslice={number}")
            done = _at_once({worker: f"run 1 {_seconds(site, 2.0)} 0" for worker in workers})
            site.report.add(
                f"slice {name}: answer; two processes, kernels of 1 ms", f"{answer}; {done[0]} and {done[1]}"
            )
    finally:
        site.report.add("the slice is the default again", policy(f"--set-timeslice={DEFAULT}"))
    site.end(*workers)


def turns_keep_the_throughput(site: Site) -> None:
    """Compare two processes that pass an idle device through a pipe with the same two without turns."""
    workers = _tenants(site, 2, "turns")
    seconds = _seconds(site, 3.0)
    free = sum(_at_once(dict.fromkeys(workers, f"run 1 {seconds} 0"))) / seconds
    for turn_ms in TURNS_MS:
        pipes = [site.folder / f"turn-{turn_ms}-{index}" for index in range(2)]
        for pipe in pipes:
            os.mkfifo(pipe)
        with contextlib.ExitStack() as stack:
            first = os.open(pipes[0], os.O_RDWR)
            stack.callback(os.close, first)
            for pipe in pipes:
                stack.callback(pipe.unlink)
            os.write(first, b"x")
            began = time.monotonic()
            done = _told_at_once(
                {
                    worker: f"turns 1 {seconds} {turn_ms} {mine} {other}"
                    for worker, mine, other in zip(workers, pipes, reversed(pipes), strict=True)
                }
            )
        # The last turn ends after the given time, so measure by the clock.
        took_s = max(float(end) for _, end in done) - began
        counts = [int(count) for count, _ in done]
        site.report.add(
            f"two processes, kernels of 1 ms, turns of {turn_ms} ms: work, against the driver's slices",
            f"{counts[0]} and {counts[1]}, {sum(counts) / took_s / max(1, free) - 1:+.1%}",
        )
    site.end(*workers)


def nvml_tells_who_computed(site: Site) -> None:
    """Compare utilization by process with the work done: one process without pauses, one with pauses."""
    workers = _tenants(site, 2, "seen")
    seconds = _seconds(site, 5.0)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(site.uuid)
    for pause_ms in (0, 30):
        before = int(time.time() * 1e6)
        workers[0].tell(f"run 10 {seconds} 0")
        workers[1].tell(f"run 10 {seconds} {pause_ms}")
        seen: dict[int, list[int]] = {worker.pid: [] for worker in workers}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(0.25, seconds / 4))
            try:
                samples = pynvml.nvmlDeviceGetProcessUtilization(handle, before)
            except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InsufficientSize):
                continue
            except pynvml.NVMLError as error:
                raise Skip(f"NVML does not say who computes: {error}") from None
            for sample in samples:
                if sample.pid in seen:
                    seen[sample.pid].append(int(sample.smUtil))
                before = max(before, int(sample.timeStamp))
        done = [int(worker.answer(PATIENCE_S).split()[1]) for worker in workers]
        worked = [f"{10 * count / (1e3 * seconds):.0%}" for count in done]
        shown = [
            f"{sum(seen[worker.pid]) / len(seen[worker.pid]):.0f}%" if seen[worker.pid] else "not named"
            for worker in workers
        ]
        site.report.add(
            f"kernels of 10 ms, the second pauses {pause_ms} ms after each: work done, shown by NVML",
            f"{' and '.join(worked)}, {' and '.join(shown)}",
        )
    site.end(*workers)


# ---- cuCtxRecordEvent ----


def recorder_library(site: Site) -> Path:
    """Compile recorder.c into the site's folder; return its path."""
    library = site.folder / "recorder.so"
    if not library.exists():
        source = Path(__file__).with_name("recorder.c")
        options = ["-O2", "-w", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
        run_program([*build.compiler(), *options], os.environ)
    return library


def recorded(answer: str) -> Recorded:
    """Return the results of a worker's recorder; skip if the driver lacks the call."""
    if answer == "missing":
        raise Skip(MISSING)
    rounds, *rest = answer.split()
    return Recorded(int(rounds), *(float(each) for each in rest))


def percentiles(found: list[Recorded]) -> str:
    """Return the median and the 99th percentile of drains."""
    ordered = sorted(each.drain_ms for each in found)
    return f"p50 {median(ordered):.2f} ms, p99 {ordered[(99 * len(ordered) - 1) // 100]:.2f} ms"


def activity(found: list[Recorded]) -> str:
    """Return how often a thread recorded and waited, the time of one call, and its share of a CPU."""
    rounds, calls_us, cpu = (
        median(side) for side in zip(*((r.rounds, r.record_us, r.cpu) for r in found), strict=True)
    )
    return f"{rounds:.0f}, {calls_us:.1f} us a record, {cpu:.1%} of a CPU"


def _recording(site: Site, name: str) -> Worker:
    (worker,) = _tenants(site, 1, name)
    if do(worker, "missing cuCtxRecordEvent") != "-":
        raise Skip(MISSING)
    assert do(worker, f"recorder {recorder_library(site)}") == "0"
    return worker


def what_is_queued_drains(site: Site) -> None:
    """Measure the time from the end of a turn until the device has done all launched work."""
    worker = _recording(site, "drain")
    for ahead_ms in AHEAD_MS:
        found = [
            recorded(do(worker, f"drain {min(1, ahead_ms / 2)} {max(2, ahead_ms)}"))
            for _ in range(5 if site.simulated else 100)
        ]
        site.report.add(
            f"drain of {max(2, ahead_ms)} kernels, {ahead_ms} ms ahead, {len(found)} times",
            percentiles(found),
        )
    site.end(worker)


def a_record_disturbs_nothing(site: Site) -> None:
    """Measure the cost of cuCtxRecordEvent, whether streams wait for it, and the CPU use of its wait."""
    worker = _recording(site, "record")
    long_ms = 20 if site.simulated else 200
    waited = recorded(do(worker, f"drain {long_ms} 1"))
    site.report.add(
        f"one cuCtxRecordEvent and its wait for a kernel of {long_ms} ms",
        f"{waited.record_us:.1f} us, {waited.drain_ms:.1f} ms at {waited.cpu:.1%} of a CPU",
    )
    took_ms = float(do(worker, f"order {long_ms}"))
    site.report.add(
        f"a short kernel in another stream, after a record during a kernel of {long_ms} ms",
        f"done after {took_ms:.1f} ms: "
        + ("it waits for the record" if took_ms > 0.8 * long_ms else "not ordered by it"),
    )
    seconds, seen = _seconds(site, 0.3), []

    def run(*, watched: bool) -> float:
        """Return the seconds of one kernel of 0.1 ms, launched without pause."""
        assert not watched or do(worker, f"watch {WATCH_US}") == "0"
        count = int(do(worker, f"run 0.1 {seconds} 0"))
        if watched:
            seen.append(recorded(do(worker, "unwatch")))
        return seconds / max(1, count)

    pairs = in_turn(lambda: run(watched=False), lambda: run(watched=True))
    site.report.add(f"records and waits beside kernels of 0.1 ms, in {seconds:.2f} s", activity(seen))
    site.judge("what records and waits, 1 ms apart, add to kernels of 0.1 ms", added(pairs))
    site.end(worker)


def a_record_meets_a_capture(site: Site) -> None:
    """Record during a capture; by cuda.h this answers 900 and invalidates each capture in the context."""
    worker = _recording(site, "capture")
    needed = ("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuThreadExchangeStreamCaptureMode")
    if absent := [name for name in needed if do(worker, f"missing {name}") != "-"]:
        raise Skip(f"this driver has no {', '.join(absent)}")
    for own in (0, 2):
        codes = [f"{name} {do(worker, f'capture {mode} {own}')}" for mode, name in enumerate(NAMES)]
        site.report.add(
            f"record by a thread in mode {NAMES[own]} during a capture: codes of it and of the capture",
            ", ".join(codes),
        )
    site.end(worker)


# ---- the turns of this package ----


def turns_of_the_package_hold(site: Site) -> None:
    """Compare two leases with 1/4 and 3/4 of the time with the same two without turns."""
    workers = _tenants(site, 2, "turned", preload=True, shares=(QUARTER, 1 - QUARTER))
    needs_turns(site, "turned-0")
    plain, seconds = _tenants(site, 2, "plain", preload=True), _seconds(site, 3.0)
    free = {ms: sum(_at_once(dict.fromkeys(plain, f"run {ms} {seconds} 0"))) / seconds for ms in LENGTHS}
    site.end(*plain)
    seconds = _seconds(site, 10.0)
    for ms in LENGTHS:
        done = _at_once(dict.fromkeys(workers, f"run {ms} {seconds} 0"))
        site.fresh()
        measured = [f"{max(0.0, site.of(f'turned-{index}')['measured_share']):.0%}" for index in range(2)]
        site.report.add(
            f"turns of leases of 1/4 and 3/4, kernels of {ms} ms: got, measured by the helper, work",
            f"{done[0] / max(1, sum(done)):.0%} of it, {' and '.join(measured)}, "
            f"{sum(done) / seconds / max(1, free[ms]) - 1:+.1%} against the driver's slices",
        )
    site.end(*workers)


def a_turn_adds_to_a_launch(site: Site) -> None:
    """Measure a launch of a lease with turns, alone on the device, then in its turn beside another lease."""
    program, plain = calls_program(site), site.lease("unshared", 2 * GIB)
    shared = site.lease("shared", 2 * GIB, share=0.5)
    (beside,) = _tenants(site, 1, "beside", preload=True, shares=(0.5,))
    needs_turns(site, "beside-0")
    launches = 50_000 * site.scale_bytes // GIB  # the best of its repetitions lies within one turn

    def launch_ns(environment: dict[str, str]) -> float:
        return call_ns(program, environment, launches)[0]

    pairs = in_turn(lambda: launch_ns(plain), lambda: launch_ns(shared))
    without, within = (median(side) for side in zip(*pairs, strict=True))
    site.report.add(
        f"a launch, {PAIRS} times {launches}, alone", f"{without:.0f} ns, with turns {within:.0f} ns"
    )
    site.judge("what turns add to a launch of a lease that is alone", added(pairs))
    beside.tell(f"run 10 {_seconds(site, 5.0)} 0")
    site.report.add("a launch in a turn, beside another lease", f"{launch_ns(shared):.0f} ns")
    beside.answer(PATIENCE_S)
    site.end(beside)


def a_guest_has_what_its_host_leaves(site: Site) -> None:
    """Run a host that computes half of the time and a guest that never pauses; then the host allocates."""
    computes, seconds = f"run {HOST_MS} {_seconds(site, 10.0)} {HOST_MS}", _seconds(site, 10.0)
    host = site.worker("time", site.lease("host", 4 * GIB))
    opened, amount = do(host, "open 0").split()
    alone = _at_once({host: computes})[0]
    plain = site.worker("time", site.lease("plain", 2 * GIB))
    assert (opened, do(plain, f"open {amount}").split()[0]) == ("0", "0")
    never_pauses = f"run {GUEST_MS} {seconds} 0"
    by_itself = _at_once({plain: never_pauses})[0]
    site.end(plain)
    for lease in site.client.ask("sample")["leases"]:
        if lease["lease"] != "host":
            site.client.ask("drop", lease=lease["lease"])
    as_guest = {"guest_of": "host", "guest_bytes": 2 * GIB}
    try:
        guest = site.worker("time", site.lease("guest", 4 * GIB, guest=as_guest))
    except Refused as refused:
        raise Skip(f"no guests here: {refused}") from None
    assert do(guest, f"open {amount}").split()[0] == "0"
    kept, got = (
        count / max(1, before)
        for count, before in zip(
            _at_once({host: computes, guest: never_pauses}), (alone, by_itself), strict=True
        )
    )
    site.report.add(
        f"a host computes and pauses {HOST_MS} ms each: it keeps, its guest gets, both",
        f"{kept:.0%}, {got:.0%}, {kept + got:.2f}",
    )
    allocates = site.worker("facts", site.lease("host", 4 * GIB))
    assert do(allocates, "init") == do(allocates, "open") == "0"
    began, moved = time.monotonic(), site.used_bytes("guest")
    assert do(allocates, f"alloc {2 * GIB}") == "0"
    took_s = time.monotonic() - began
    site.fresh()
    assert site.of("guest")["phase"] == "suspended"
    site.report.add(
        "an allocation of the host for which its guest leaves",
        f"{1000 * took_s:.0f} ms, a guest of {moved >> 20} MiB",
    )
    site.end(host, guest, allocates)


def needs_turns(site: Site, name: str) -> None:
    """Skip if turns are not in force for a lease that requested them."""
    site.fresh()
    lease = site.of(name)
    if lease["compute_share"] == "off":
        raise Skip(f"no turns here: {lease['share_reason'] or 'this package keeps none'}")
