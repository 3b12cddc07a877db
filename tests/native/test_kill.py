"""A process may be killed at any instruction: the account of its lease is right afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.programs import compiled, run
from tests.native.worker import Worker
from tests.simulator import ACCOUNT_BYTES, GIB, Lease, Simulator

SOURCE = Path(__file__).with_name("kill.c")
KILLS = 400
# Each with a new account, so that the first opening is cut short too.
ACCOUNTS = 4


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("kill") / "kill", "-std=gnu11", "-O2", "-Wall", SOURCE)


def test_hundreds_of_kills_leave_the_account_right(machine: Simulator, half: Lease, killer: Path) -> None:
    env = machine.env(**half.env())
    env["VICTIM_PRELOAD"] = env.pop("LD_PRELOAD")
    had_memory = 0
    for round in range(ACCOUNTS):
        (half.folder / "account").write_bytes(bytes(ACCOUNT_BYTES))
        done = run(killer, str(KILLS // ACCOUNTS), str(round), env=env)
        assert (done.returncode, done.stdout.strip()) == (0, str(KILLS // ACCOUNTS)), done.stderr
        had_memory += sum(1 for slot in half.slots().values() if slot.used_bytes[0])
        assert machine.device_used(0) == 0
        with Worker(machine.env(**half.env())) as kernel:
            # All of the share can be had, to the last page, and not more.
            assert kernel.ask("gpu.memory()") == [40 * GIB, 40 * GIB]
            kernel.run("blocks = [gpu.allocate('10GiB') for _ in range(4)]")
            assert kernel.ask("gpu.memory()") == [0, 40 * GIB]
            assert set(half.slots()) == {kernel.pid}
            assert half.slots()[kernel.pid].used_bytes[0] == machine.device_used(0) == 40 * GIB
    assert machine.device_peak(0) == 40 * GIB  # never more, whatever the dead had left
    assert had_memory > 0  # some of them were killed while they held memory
