"""The preload library keeps all processes of a lease together within its memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.calls import CALLS, in_lease, used
from tests.native.programs import run
from tests.native.worker import Worker, WorkerError
from tests.simulator import ACCOUNT_BYTES, GIB, PAGE_BYTES, SLOT, SLOTS, Lease, Phase, Simulator


def test_only_the_share_is_seen(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("b = gpu.allocate('10GiB')")
        assert kernel.ask("gpu.memory()") == [30 * GIB, 40 * GIB]
        assert kernel.ask("made('cuDeviceTotalMem_v2', 0)") == [0, 40 * GIB]
        kernel.run("import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0)")
        for version in ("", ", n.nvmlMemory_v2"):
            kernel.run(f"m = n.nvmlDeviceGetMemoryInfo(h{version})")
            assert kernel.ask("[m.total, m.used, m.free]") == [40 * GIB, 10 * GIB, 30 * GIB]
        # There is no other device.
        assert kernel.ask("[n.nvmlDeviceGetCount(), demo_gpu.device_count()]") == [1, 1]


def test_free_is_what_the_lease_has_left_whatever_a_process_without_a_lease_holds(
    machine: Simulator, half: Lease
) -> None:
    """The library answers by itself: the driver would be asked while the process may be locked."""
    with Worker(machine.env()) as stranger, in_lease(machine, half) as kernel:
        stranger.run("b = gpu.allocate('70GiB')")
        before = half.slots()[kernel.pid].queries
        assert kernel.ask("gpu.memory()") == [40 * GIB, 40 * GIB]
        assert half.slots()[kernel.pid].queries == before
        assert kernel.ask("[alloc(11 << 30)[0], alloc(10 << 30)[0]]") == [2, 0]


def test_contexts_are_charged_as_the_helper_says(machine: Simulator, half: Lease) -> None:
    half.context_bytes = 2 * GIB
    half.write(Phase.RUNNING)
    with in_lease(machine, half) as kernel:
        assert kernel.ask("gpu.memory()") == [38 * GIB, 40 * GIB]
        assert kernel.ask("alloc(38 << 30)[0]") == 0
        assert kernel.ask("alloc(1)[0]") == 2


def test_two_kernels_share_one_limit(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as one, in_lease(machine, half) as two:
        one.run("b = gpu.allocate('30GiB')")
        with pytest.raises(
            WorkerError, match=r"asked for 20 GiB, 10 GiB of 40 GiB are free in your share of this GPU"
        ):
            two.run("gpu.allocate('20GiB')")
        two.run("b = gpu.allocate('10GiB')")
        assert machine.device_peak(0) == 40 * GIB
        assert half.denied() == 1
        one.run("gpu.call('cuMemFree', b.address)")
        two.run("c = gpu.allocate('30GiB')")
    assert machine.device_peak(0) == 40 * GIB


@pytest.mark.parametrize(
    ("take", "give"),
    [
        ("alloc(4 << 30)", "free({0})"),
        ("alloc_async(4 << 30)", "free_async({0})"),
        ("alloc_async(4 << 30, '_ptsz')", "free_async({0}, '_ptsz')"),
        ("alloc_pool(4 << 30)", "free({0})"),
        ("alloc_pool(4 << 30, '_ptsz')", "free_async({0})"),
        ("pitch(1 << 20, 1 << 12)", "free({0})"),
        ("managed(4 << 30)", "free({0})"),
        ("create(4 << 30)", "release({0})"),
        ("array(1 << 14, 1 << 14)", "free_array({0})"),
    ],
)
def test_every_way_to_allocate_is_limited_and_given_back(
    machine: Simulator, half: Lease, take: str, give: str
) -> None:
    with in_lease(machine, half) as kernel:
        answers = [kernel.ask(take) for _ in range(10)]
        assert [code for code, _ in answers] == [0] * 10
        assert machine.device_used(0) == 40 * GIB
        assert kernel.ask(take)[0] == 2
        for _, handle in answers:
            assert kernel.ask(give.format(handle)) == 0
        kernel.run("cuda.cuCtxSynchronize()")  # when pools give back what they keep
        assert machine.device_used(0) == 0
        assert set(half.slots()[kernel.pid].used_bytes) == {0}
        assert kernel.ask("alloc(40 << 30)[0]") == 0


@pytest.mark.parametrize(
    ("format_", "channels", "side", "bytes_"),
    [
        (0x01, 4, 1 << 14, 4 << 28),  # unsigned 8 bit
        (0x20, 1, 1 << 14, 4 << 28),  # float
        (0xC5, 4, 1 << 14, 8 << 28),  # UNORM_INT16X4
        (0x91, 4, 1 << 14, 1 << 27),  # BC1: 8 bytes for 16 elements
        (0x9D, 4, 1 << 14, 1 << 28),  # BC7: 16 bytes for 16 elements
        (0x7F, 1, 1 << 14, 16 << 28),  # newer than the library: the largest
    ],
)
def test_arrays_are_charged_by_their_format(
    machine: Simulator, half: Lease, format_: int, channels: int, side: int, bytes_: int
) -> None:
    with in_lease(machine, half) as kernel:
        shape = f"(ctypes.c_size_t * 3)({side}, {side}, {format_} | {channels} << 32)"
        kernel.run(f"cuda.cuArrayCreate_v2(ctypes.byref(ctypes.c_void_p()), {shape})")
        assert used(half, kernel) == bytes_


def test_physical_memory_is_charged_until_released_and_unmapped(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("n = 20 << 30; at = reserve(2 * n)[1]; first, second = create(n)[1], create(n)[1]")
        assert (
            kernel.ask("[map(at, n, first), map(at + n, n, second), release(first), release(second)]")
            == [0] * 4
        )
        assert kernel.ask("create(2 << 20)[0]") == 2
        assert kernel.ask("unmap(at, n)") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 20 * GIB
        assert kernel.ask("create(n)[0]") == 0
        kernel.run("code, again = retain(at + n)")
        assert kernel.ask("[code, unmap(at + n, n)]") == [0, 0]
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 40 * GIB
        assert kernel.ask("release(again)") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 20 * GIB


@pytest.mark.parametrize("end", ["[release(handle), unmap(at, n)]", "[unmap(at, n), release(handle)]"])
def test_exported_memory_is_charged_until_the_process_ends(machine: Simulator, half: Lease, end: str) -> None:
    """The driver keeps it while another process holds it, which this one cannot see."""
    with in_lease(machine, half) as kernel, in_lease(machine, half) as other:
        kernel.run("n = 10 << 30; at, handle = reserve(n)[1], create(n)[1]; map(at, n, handle)")
        kernel.run("code, shared = export(handle)")
        assert kernel.ask(f"[code, *{end}]") == [0, 0, 0]
        assert used(half, kernel) == machine.device_used(0) == 10 * GIB
        kernel.run("os.close(shared)")
        # What is not exported comes and goes as before, with a handle that may have been that one.
        assert kernel.ask("release(create(20 << 30)[1])") == 0
        assert (used(half, kernel), machine.device_used(0)) == (10 * GIB, 0)
        assert kernel.ask("export(handle)[0]") == 1
        assert other.ask("[create(31 << 30)[0], create(30 << 30)[0]]") == [2, 0]
        kernel.kill()
        assert other.ask("create(10 << 30)[0]") == 0


def test_what_the_driver_refuses_is_given_back(machine: Simulator, half: Lease) -> None:
    with Worker(machine.env()) as neighbour, in_lease(machine, half) as kernel:
        neighbour.run("b = gpu.allocate('79GiB')")
        for take in ("alloc(2 << 30)", "alloc_async(2 << 30)", "create(2 << 30)", "managed(2 << 30)"):
            assert kernel.ask(take)[0] == 2
        assert kernel.ask("free(4096)") == 1
        assert set(half.slots()[kernel.pid].used_bytes) == {0}
        assert half.slots()[kernel.pid].taints == 0
        assert half.denied() == 0


def test_small_allocations_are_charged_as_the_device_loses_them(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("many = [alloc(1000 * i)[1] for i in range(1, 200)] + [alloc(3 << 20)[1]]")
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) > 0
        assert kernel.ask("sum(free(at) for at in many)") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 0


def test_the_end_of_a_context_gives_its_memory_back(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("kept = create(2 << 30)[1]; alloc(3 << 30)")
        assert kernel.ask("cuda.cuDevicePrimaryCtxReset_v2(0)") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 2 * GIB
        kernel.run("code, own = made('cuCtxCreate_v2', 0, 0); alloc(1 << 30)")
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 3 * GIB
        assert kernel.ask("cuda.cuCtxDestroy_v2(ctypes.c_void_p(own))") == 0
        assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 2 * GIB


@pytest.mark.parametrize(
    "broken", ["no page", "no account", "short page", "wrong magic", "link", "no folder"]
)
def test_without_valid_files_every_allocation_is_denied(machine: Simulator, half: Lease, broken: str) -> None:
    limit, account = half.folder / "limit", half.folder / "account"
    env = machine.env(**half.env())
    if broken == "no page":
        limit.unlink()
    elif broken == "no account":
        account.unlink()
    elif broken == "short page":
        limit.write_bytes(limit.read_bytes()[: PAGE_BYTES - 1])
    elif broken == "wrong magic":
        limit.write_bytes(b"\0" * PAGE_BYTES)
    elif broken == "link":
        limit.rename(half.folder / "elsewhere")
        limit.symlink_to(half.folder / "elsewhere")
    else:
        del env["GPUSHARE_LEASE_DIR"]
    with Worker(env, open_gpu=False) as kernel:
        kernel.run(CALLS)
        kernel.run("cuda.cuInit(0)")
        # Without a context there is nothing to allocate on; where one is to be had, it is refused too.
        refused = kernel.ask("made('cuDevicePrimaryCtxRetain', 0)[0] or made('cuCtxCreate_v2', 0, 0)[0]")
        code = refused or kernel.ask("alloc(1)[0]")
        assert code == 2
        assert kernel.ask("create(2 << 20)[0]") == 2
        kernel.process.stdin.close()  # type: ignore[union-attr]
        said = kernel.stderr()
    assert said.count("gpushare: GPU memory cannot be allocated") == 1
    assert machine.device_peak(0) == 0


def test_a_revoked_lease_is_denied_at_once(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        assert kernel.ask("alloc(1 << 30)[0]") == 0
        half.write(Phase.REVOKED)
        assert kernel.ask("alloc(1)[0]") == 2
        assert kernel.ask("made('cuDevicePrimaryCtxRetain', 0)[0]") == 2
        assert kernel.ask("made('cuCtxCreate_v2', 0, 0)[0]") == 2


def test_a_lowered_limit_denies_more_but_takes_nothing(machine: Simulator, half: Lease) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run("at = alloc(30 << 30)[1]")
        half.limits = [(machine.uuid(0), 20 * GIB)]
        half.write(Phase.RUNNING)
        assert kernel.ask("alloc(1)[0]") == 2
        assert kernel.ask("gpu.memory()") == [0, 20 * GIB]
        assert kernel.ask("free(at)") == 0
        assert kernel.ask("alloc(20 << 30)[0]") == 0


def test_devices_are_told_apart_by_uuid_not_by_number(machine: Simulator) -> None:
    lease = Lease(machine.folder / "lease", [(machine.uuid(1), 10 * GIB), (machine.uuid(0), 20 * GIB)])
    with in_lease(machine, lease, CUDA_VISIBLE_DEVICES=f"{machine.uuid(1)},{machine.uuid(0)}") as kernel:
        kernel.run("other = demo_gpu.open(1)")
        assert kernel.ask("[gpu.memory()[1], other.memory()[1]]") == [10 * GIB, 20 * GIB]
        kernel.run("gpu.allocate('10GiB'); other.allocate('20GiB')")
        assert (machine.device_used(1), machine.device_used(0)) == (10 * GIB, 20 * GIB)
        for which in ("gpu", "other"):
            with pytest.raises(WorkerError):
                kernel.run(f"{which}.allocate(1)")


def test_outside_a_lease_the_library_is_not_there(machine: Simulator) -> None:
    env = machine.env(LD_PRELOAD=str(native.preload_path()))
    with Worker(env) as kernel:
        kernel.run(CALLS)
        assert kernel.ask("gpu.memory()") == [80 * GIB, 80 * GIB]
        assert kernel.ask("[alloc(70 << 30)[0], create(10 << 30)[0], alloc(1)[0]]") == [0, 0, 2]


def test_a_process_without_a_gpu_is_left_alone(half: Lease) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("LD_")} | half.env()
    done = run("/bin/echo", "hello", env=env, check=True)
    assert (done.stdout, done.stderr) == ("hello\n", "")
    assert half.slots() == {}


def test_more_processes_than_slots_are_denied_but_still_counted(machine: Simulator, half: Lease) -> None:
    """The account is full of living processes: fail closed, and no wake-up lost."""
    account = bytearray(ACCOUNT_BYTES)
    (half.folder / "account").write_bytes(account)
    with in_lease(machine, half) as first:
        first.run("alloc(1 << 20)")
        me = half.slots()[first.pid]
        data = bytearray((half.folder / "account").read_bytes())
        pid = first.pid.to_bytes(4, "little")
        own = next(i for i in range(SLOTS) if data.startswith(pid, 80 + SLOT.size * i))
        slot = bytes(data[80 + SLOT.size * own : 80 + SLOT.size * (own + 1)])
        with (half.folder / "account").open("r+b") as file:
            for i in range(SLOTS):
                if i != own:
                    file.seek(80 + SLOT.size * i)
                    file.write(slot)
        with in_lease(machine, half) as late:
            before = (half.folder / "account").read_bytes()
            assert late.ask("alloc(1)[0]") == 2
            assert late.ask("cuda.cuCtxSynchronize()") == 0
            after = (half.folder / "account").read_bytes()
            assert before != after
            assert late.pid not in half.slots()
        assert me.pid in half.slots()


def test_the_folder_of_the_libraries_is_named_or_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert native.preload_path().is_file()
    monkeypatch.setattr(native, "_HERE", tmp_path)
    with pytest.raises(Exception, match=r"not built.*jupyter_gpushare.native.build"):
        native.preload_path()
    blank = tmp_path / "with blank"
    (blank / "lib" / "sim").mkdir(parents=True)
    for name in (native.PRELOAD_NAME, *(f"sim/{n}" for n in native.SIMULATED_NAMES)):
        (blank / "lib" / name).touch()
    monkeypatch.setattr(native, "_HERE", blank)
    assert native.lib_dir() == blank / "lib"
    with pytest.raises(Exception, match="dynamic linker"):
        native.sim_dir()
