"""Scenarios with real frameworks, of which only Numba runs on the simulated driver."""

from __future__ import annotations

import time
from statistics import median

from jupyter_gpushare.gpu.driver.nvml import Nvml
from tests.gpu.machine import GIB
from tests.gpu_real.direct import bring_back, checkpoint_of, listed, move_of, park, says
from tests.gpu_real.other_gpu import equal_devices, restore
from tests.gpu_real.overhead import PAIRS, added, in_turn
from tests.gpu_real.recorder import Recorded
from tests.gpu_real.shares import (
    AHEAD_MS,
    MISSING,
    WATCH_US,
    activity,
    percentiles,
    recorded,
    recorder_library,
)
from tests.gpu_real.site import PATIENCE_S, Site, Skip, do, need, without_library
from tests.gpu_real.survival import children_live_through, works_again

STEPS = 400


def its_memory_comes_back_as_it_was(site: Site, kind: str) -> None:
    """Suspend through the helper or, where it cannot (a container that hides processes), the driver alone."""
    need(kind)
    name = f"back-{kind}"
    worker = site.worker(kind, site.lease(name, 8 * GIB), 2048)
    move = move_of(site)
    for _ in range(3):
        out_s, back_s = move(site, name, worker)
        assert do(worker, "check") == "ok"
    site.report.add(
        f"{kind}, tensors of 2 GiB, third time, {move.__name__.replace('_', ' ')}",
        f"{out_s:.2f} s out, {back_s:.2f} s back",
    )
    site.end(worker)


def its_memory_moves_to_another_gpu(site: Site, kind: str) -> None:
    """Move a process that sees one GPU, with driver calls; check its tensors, and allocate more there."""
    need(kind)
    checkpoint, (first, second) = checkpoint_of(site), equal_devices(site)
    worker = site.worker(kind, site.lease(f"moving-{kind}", 8 * GIB, preload=False), 2048)
    parked, began = park(checkpoint, worker.pid), time.monotonic()
    code = restore(checkpoint, worker.pid, {first: second})
    took_s = time.monotonic() - began
    back = bring_back(checkpoint, worker.pid)
    answers = [says(worker, command) for command in ("check", "alloc 512", "check")]
    site.report.add(
        f"{kind}, tensors of 2 GiB, restored on another GPU",
        f"{parked}, Restore {code} in {took_s:.2f} s, {back}; "
        f"kept, 512 MiB more, kept: {', '.join(answers)}; "
        f"shown there: {listed(Nvml(), second, worker.pid)}",
    )
    assert answers[0] == "ok", answers
    site.end(worker)


def its_memory_is_limited_with_a_clean_error(site: Site, kind: str) -> None:
    need(kind)
    site.needs_a_limit()
    worker = site.worker(kind, site.lease(f"limit-{kind}", 4 * GIB), 1024)
    assert do(worker, "alloc 8192") == "2"
    assert do(worker, "alloc 512") == "0"
    assert do(worker, "check") == "ok"
    site.report.add(f"{kind}, limit 4 GiB", "8 GiB more: its own out-of-memory error; 512 MiB more: granted")
    site.end(worker)


def every_allocator_of_torch_sees_and_keeps_the_limit(site: Site, allocator: str) -> None:
    need("torch")
    site.needs_a_limit()
    name = "torch-" + allocator.partition(":")[0].replace("_", "-")
    environment = site.lease(name, 4 * GIB)
    if allocator != "native":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = environment["PYTORCH_ALLOC_CONF"] = allocator
    worker = site.worker("torch", environment)
    free, total = (int(word) for word in do(worker, "info").split())
    assert free < total == 4 * GIB
    got = 0
    while do(worker, "alloc 256") == "0":
        got += 256
        assert got <= 4096
    assert do(worker, "check") == "ok"
    site.report.add(f"torch, {allocator}, limit 4 GiB", f"{got} MiB of tensors")
    assert got >= 2048
    shown = site.blind or f"{site.used_bytes(name) / GIB:.2f} GiB"
    site.report.add("what the driver shows of it", shown)
    site.end(worker)


def training_that_is_stopped_has_the_same_loss_curve(site: Site) -> None:
    """Lock twice and suspend twice during training; the loss is the same, bit by bit."""
    need("torch")
    site.needs_suspending()
    plain = site.worker("torch", site.lease("curve-plain", 6 * GIB))
    expected = do(plain, f"curve {STEPS}")
    site.end(plain)
    worker = site.worker("torch", site.lease("curve", 6 * GIB))
    worker.tell(f"curve {STEPS}")
    moves = 0
    for _ in range(4):
        time.sleep(0.4)
        moved = site.ask("suspend", lease="curve")
        moves += moved["done"]
        time.sleep(0.2)
        assert site.ask("resume", lease="curve")["done"]
    assert moves
    verb, curve = worker.answer(PATIENCE_S).split(" ", 1)
    assert (verb, curve) == ("curve", expected)
    site.report.add(f"loss curve of {STEPS} steps, stopped {moves} times", "identical, bit by bit")
    site.end(worker)


def what_the_library_adds_to_a_training_loop(site: Site) -> None:
    need("torch")
    leased = site.lease("loop", 6 * GIB)
    alone = site.worker("torch", without_library(leased))
    within = site.worker("torch", leased)
    for worker in (alone, within):
        do(worker, "time 200")
    pairs = in_turn(lambda: float(do(alone, "time 1000")), lambda: float(do(within, "time 1000")))
    site.end(alone, within)
    before, after = (median(side) for side in zip(*pairs, strict=True))
    site.report.add(
        f"training loop, 1000 steps, {PAIRS} times", f"{before:.3f} s, with the library {after:.3f} s"
    )
    site.judge("what the library adds to a training loop", added(pairs))


def loaders_live_through_a_suspension(site: Site) -> None:
    """Test the forked workers of a DataLoader, while the kernel sleeps and after it was killed."""
    need("torch")
    free = Nvml().free_bytes(site.uuid)
    worker = site.worker("torch-life", site.lease("loaders", 4 * GIB))
    children = [int(pid) for pid in do(worker, "loaders").split(",")]
    children_live_through(site, "loaders", worker, children, free, "batches")


def what_torch_made_before_works_after_a_suspension(site: Site, make: str, use: str) -> None:
    """Test a captured graph, and compiled code."""
    need("torch")
    worker = site.worker("torch-life", site.lease(make, 4 * GIB))
    made = do(worker, make)
    if made.startswith("no "):
        raise Skip(f"torch.{make} does not work here: {made}")
    assert made == "ok"
    works_again(site, make, worker, use)


# ---- shares of time ----


def a_training_step_drains(site: Site) -> None:
    """Measure the time from the end of a turn until the device has done PyTorch's launched steps."""
    need("torch")
    worker = site.worker("torch-time", site.lease("drain-torch", 8 * GIB, preload=False))
    do(worker, f"recorder {recorder_library(site)}")
    step_ms = float(do(worker, "step"))
    for ahead_ms in AHEAD_MS:
        steps = max(1, round(ahead_ms / step_ms))
        found = [recorded(do(worker, f"drain {steps}")) for _ in range(100)]
        site.report.add(f"drain of {steps} training steps of {step_ms:.1f} ms, 100 times", percentiles(found))
    site.end(worker)


def a_record_slows_no_training_loop(site: Site) -> None:
    """Run a thread that records and waits, 1 ms apart, beside a loop of small kernels."""
    need("torch")
    worker = site.worker("torch-time", site.lease("watched-torch", 8 * GIB, preload=False))
    do(worker, f"recorder {recorder_library(site)}")
    do(worker, "time 200")
    seen: list[Recorded] = []

    def watched() -> float:
        if do(worker, f"watch {WATCH_US}") == "missing":
            raise Skip(MISSING)
        took_s = float(do(worker, "time 500"))
        seen.append(recorded(do(worker, "unwatch")))
        return took_s

    pairs = in_turn(lambda: float(do(worker, "time 500")), watched)
    site.report.add("records and waits beside 500 training steps", activity(seen))
    site.judge("what records and waits, 1 ms apart, add to a training loop", added(pairs))
    site.end(worker)


def two_jobs_with_input_pipelines_share_a_device(site: Site) -> None:
    """Run training with a DataLoader that leaves the device idle at times: one job, then two at once."""
    need("torch")
    workers = [site.worker("torch-time", site.lease(f"job-{index}", 8 * GIB)) for index in range(2)]
    for worker in workers:
        do(worker, "pipeline 3")
    rate, busy = (float(word) for word in do(workers[0], "pipeline 10").split())
    for worker in workers:
        worker.tell("pipeline 10")
    both = [float(worker.answer(PATIENCE_S).split()[1]) for worker in workers]
    site.report.add(
        "training with an input pipeline: alone, two at once",
        f"{rate:.1f} batches a second with the device in use for at most {busy:.0%} of the time, "
        f"{both[0]:.1f} and {both[1]:.1f} (together {sum(both) / rate:.0%} of alone)",
    )
    site.end(*workers)
