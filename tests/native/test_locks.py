"""The preload library holds none of its locks while it is inside the driver, which may wait for ever."""

from __future__ import annotations

import pytest

from tests.gpu.machine import until
from tests.native.calls import in_lease
from tests.simulator import Fault, Lease, Simulator

#: `others` makes every kind of call that keeps an account or a table, once.
ASIDE = """
go, ready, came_back = threading.Event(), threading.Event(), []
kept, handle, at = alloc(1 << 20)[1], create(2 << 20)[1], mapped()
def aside(call):
    cuda.cuCtxSetCurrent(ctypes.c_void_p(int(gpu._context)))
    ready.set()
    go.wait()
    came_back.append(eval(call))
def others():
    code, small = alloc(1 << 20)
    code = code or free(small)
    pooled = alloc_async(4 << 20)
    code = code or pooled[0] or free_async(pooled[1])
    there = mapped()
    return code or unmap(there, 2 << 20) or cuda.cuCtxSynchronize()
"""


@pytest.mark.parametrize(
    "call",
    [
        "alloc(1 << 20)[0]", "free(kept)", "alloc_async(1 << 20)[0]", "create(2 << 20)[0]", "release(handle)",
        "map(at, 2 << 20, handle)", "unmap(at, 2 << 20)", "retain(at)[0]",
        "cuda.cuCtxSynchronize()", "made('cuDevicePrimaryCtxRetain', 0)[0]",
    ],
)  # fmt: skip
def test_a_call_that_hangs_in_the_driver_holds_up_no_other_thread(
    machine: Simulator, half: Lease, call: str
) -> None:
    with in_lease(machine, half) as kernel:
        kernel.run(ASIDE)
        kernel.run(f"thread = threading.Thread(target=aside, args=({call!r},)); thread.start(); ready.wait()")
        machine.fault(Fault.HANG_CALL, pid=kernel.pid, value=600_000)
        kernel.run("go.set()")
        until(lambda: machine.faults_left() == 0, "it hangs")
        assert kernel.ask("others()") == 0
        assert kernel.ask("came_back") == []
        machine.clear_faults()
        kernel.run("thread.join()")
        assert len(kernel.ask("came_back")) == 1
