"""Memory of a lease that is kept for another one: who wants it asks, and waits; only the limit denies.

The helper answers such a question by suspending the guest (gpu/moves/guests.py); here a test does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.native.calls import GRAPHS, in_lease, used
from tests.native.worker import Worker
from tests.simulator import GIB, MIB, Lease, Phase, Simulator
from tests.waiting import until

KEPT = 10 * GIB
LEFT = 30  # GiB


@pytest.fixture
def host(machine: Simulator, half: Lease) -> Iterator[Worker]:
    """A process of a lease of 40 GiB, of which 10 are kept for another one."""
    half.keep(KEPT)
    with in_lease(machine, half) as process:
        yield process


def wants(lease: Lease, process: Worker) -> int:
    return lease.slots()[process.pid].wants_memory


def asks(lease: Lease, process: Worker) -> bool:
    before = wants(lease, process)
    time.sleep(0.02)
    return wants(lease, process) > before


WAYS = [
    ("alloc({0} << 30)", "free({1})"),
    ("alloc_async({0} << 30)", "free_async({1})"),
    ("alloc_pool({0} << 30, '_ptsz')", "free_async({1})"),
    ("pitch({0} << 20, 1 << 10)", "free({1})"),
    ("managed({0} << 30)", "free({1})"),
    ("create({0} << 30)", "release({1})"),
    ("array({0} << 12, 1 << 14)", "free_array({1})"),
]


@pytest.mark.parametrize(("take", "give"), WAYS)
def test_every_way_to_allocate_waits_until_nothing_is_kept(
    half: Lease, host: Worker, take: str, give: str
) -> None:
    code, first = host.ask(take.format(LEFT))
    assert (code, wants(half, host)) == (0, 0)
    host.start(take.format(5))
    assert host.is_waiting()
    assert asks(half, host)
    half.keep(0)
    code, second = host.answer()
    assert code == 0
    assert used(half, host) == (LEFT + 5) * GIB
    assert host.ask(take.format(6))[0] == 2
    assert half.denied() == 1
    assert not asks(half, host)
    assert [host.ask(give.format("", each)) for each in (first, second)] == [0, 0]


def test_it_goes_on_too_when_the_lease_has_freed_enough_by_itself(half: Lease, host: Worker) -> None:
    host.run(
        "first = alloc(20 << 30)[1]; context = ctypes.c_void_p(); cuda.cuCtxGetCurrent(ctypes.byref(context))"
    )
    host.run("later = lambda: (time.sleep(0.3), cuda.cuCtxSetCurrent(context), free(first))")
    host.run("threading.Thread(target=later).start()")
    began = time.monotonic()
    assert host.ask("alloc(20 << 30)[0]") == 0
    assert time.monotonic() - began > 0.2
    assert half.denied() == 0


def test_the_limit_denies_at_once_what_could_never_fit(half: Lease, host: Worker) -> None:
    assert host.ask("alloc(41 << 30)[0]") == 2
    assert (half.denied(), wants(half, host)) == (1, 0)


def test_a_lease_that_ends_while_it_waits_is_denied(half: Lease, host: Worker) -> None:
    host.start("alloc(35 << 30)[0]")
    assert host.is_waiting()
    half.write(Phase.REVOKED)
    assert host.answer() == 2


def test_who_waits_waits_on_while_the_lease_sleeps_and_is_seen_to(half: Lease, host: Worker) -> None:
    """As the guest itself does: it is suspended, and its call goes on where it has its whole limit."""
    host.start("alloc(35 << 30)[0]")
    until(lambda: asks(half, host))
    half.write(Phase.SUSPENDED)
    until(lambda: not asks(half, host))
    work, calls = half.slots()[host.pid].work, half.slots()[host.pid].calls
    until(lambda: half.slots()[host.pid].calls > calls)
    half.kept_bytes = 0
    half.write(Phase.RUNNING)
    assert host.answer() == 0
    assert half.slots()[host.pid].work == work


def test_who_died_while_it_waited_asks_no_more(half: Lease, host: Worker) -> None:
    """The word grows only while a thread waits: whatever became of the thread, it stays as it is."""
    host.start("alloc(35 << 30)[0]")
    until(lambda: asks(half, host))
    host.kill()
    assert not asks(half, host)


def test_the_host_sees_its_limit_and_frees_without_its_guest(half: Lease, host: Worker) -> None:
    assert host.ask("gpu.memory()") == [40 * GIB, 40 * GIB]
    host.run("b = gpu.allocate('30GiB')")
    assert host.ask("gpu.memory()") == [10 * GIB, 40 * GIB]


def test_what_a_pool_has_needs_nothing_that_is_kept(half: Lease, host: Worker) -> None:
    host.run("code, at = alloc_async(30 << 30); free_async(at)")
    for _ in range(3):
        host.run("code, at = alloc_async(30 << 30)")
        assert host.ask("[code, free_async(at)]") == [0, 0]
    assert wants(half, host) == 0


def test_pools_are_not_trimmed_for_a_guest(half: Lease, host: Worker) -> None:
    host.run("cuda.cuMemPoolSetAttribute(pool(), 4, ctypes.byref(u64(1 << 60)))")
    host.run("code, at = alloc_async(30 << 30); free_async(at); cuda.cuCtxSynchronize()")
    host.start("alloc(5 << 30)[0]")
    until(lambda: asks(half, host))
    assert used(half, host) == 30 * GIB
    half.keep(0)
    assert host.answer() == 0
    assert used(half, host) == 35 * GIB


def test_an_allocation_in_a_capture_takes_nothing_and_its_launch_asks(half: Lease, host: Worker) -> None:
    """What a launch needs is not known before: what it took beyond what is left is asked for behind it."""
    host.run(GRAPHS)
    host.run("b = gpu.allocate('25GiB'); graph = executable(8 << 30)")
    assert wants(half, host) == 0
    host.start("cuda.cuGraphLaunch(graph, None)")
    assert host.is_waiting()
    assert asks(half, host)
    half.keep(0)
    assert host.answer() == 0


DRIVER_CALLS = [
    "alloc(12 << 30)[0]",
    "create(12 << 30)[0]",
    "alloc_async(12 << 30)[0]",
    "array(12 << 12, 1 << 14)[0]",
    "cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)",
]


@pytest.mark.parametrize("call", DRIVER_CALLS)
def test_where_the_driver_has_no_memory_the_guest_leaves_and_it_is_called_once_more(
    tmp_path_factory: pytest.TempPathFactory, call: str
) -> None:
    """Fragments, contexts and code are in no account."""
    machine = Simulator(tmp_path_factory.mktemp("gpu"), "1xH100-80GB,host=512GiB,context=1GiB,free-delay=0")
    lease = Lease(machine.folder / "lease", [(machine.uuid(0), 40 * GIB)])
    lease.keep(KEPT)
    with Worker(machine.env()) as guest, in_lease(machine, lease, open_gpu="Retain" not in call) as host:
        left = (machine.device_total(0) - machine.device_used(0)) // MIB
        guest.run(f"b = gpu.allocate('{left - 512}MiB')")
        host.start(call)
        assert host.is_waiting(), host.answer()
        assert asks(lease, host)
        guest.kill()
        lease.keep(0)
        assert host.answer() == 0
        assert lease.denied() == 0


def test_without_a_guest_the_drivers_word_stands(machine: Simulator, half: Lease) -> None:
    with Worker(machine.env()) as stranger, in_lease(machine, half) as process:
        stranger.run("b = gpu.allocate('75GiB')")
        assert process.ask("alloc(12 << 30)[0]") == 2
        assert wants(half, process) == 0
        stranger.kill()


def test_a_call_counts_once_however_long_it_waits(half: Lease, host: Worker) -> None:
    before = half.slots()[host.pid].work
    host.start("alloc(35 << 30)[0]")
    assert host.is_waiting()
    half.write(Phase.SUSPENDED)
    assert host.is_waiting(0.3)
    half.kept_bytes = 0
    half.write(Phase.RUNNING)
    assert host.answer() == 0
    assert half.slots()[host.pid].work == before + 1
