"""A simulated GPU machine for tests: its environment, its switches and its ledger.

    machine = Simulator(tmp_path, "2xH100-80GB,host=512GiB")
    subprocess.run([...], env=machine.env())
    machine.fault(Fault.LOCK_TIMEOUT, pid=child.pid)
    assert machine.device_used(0) == 0

One `Simulator` is one state file.  A test process may have several, and never calls ``cuInit``
itself.  `Lease` writes the two files of a lease as the device helper does.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from jupyter_gpushare import native
from jupyter_gpushare.gpu.leases.files import LeaseDirectory

GIB = 1 << 30
MIB = 1 << 20

#: The structures of native/gpushare_lease.h; tests/native/test_layout.py compares their `sizeof`.
PAGE_HEADER = struct.Struct("<IIHHIII")
PAGE_DEVICE = struct.Struct("<16sQQ16sQ")
DEVICES = 16
SLOTS = 256
PAGE_BYTES = PAGE_HEADER.size + DEVICES * PAGE_DEVICE.size
ACCOUNT_HEADER = struct.Struct("<IIQ64x")
SLOT = struct.Struct("<iIQQQQQQQII16Q")
ACCOUNT_BYTES = ACCOUNT_HEADER.size + SLOTS * SLOT.size
PAGE_MAGIC = 0x4C535047
VERSION = 5


class Fault(IntEnum):
    """The faults that the simulated driver can inject (enum sim_fault_kind)."""

    LOCK_TIMEOUT = 1
    CHECKPOINT_FAILS = 2
    RESTORE_POISONS = 3
    RESTORE_FAILS = 4
    UNLOCK_FAILS = 5
    DEVICE_LOST = 6
    HANG_CALL = 7
    HANG_NVML = 8
    HANG_CHECKPOINT = 9
    XID = 10
    ECC = 11
    DRIVER_RESTART = 12
    MPS = 13
    CHECKPOINT_FAILS_UNHARMED = 14
    LOCK_KILLS = 15
    CHECKPOINT_KILLS = 16
    RESTORE_KILLS = 17
    RECOVERY_ACTION = 18


class Phase(IntEnum):
    """Which calls the processes of a lease may make (enum gpushare_phase)."""

    RUNNING = 0
    SUSPENDING = 1
    SUSPENDED = 2
    PAUSED = 3
    REVOKED = 4


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the ledger."""

    ns: int
    pid: int
    event: str
    device: int
    bytes: int
    device_used: int
    host_used: int
    from_device: int = -1  # of "move"


def _control() -> ctypes.CDLL:
    return ctypes.CDLL(str(native.sim_dir() / "libcuda.so.1"), mode=os.RTLD_LOCAL | os.RTLD_NOW)


class Simulator:
    """A simulated machine with its state in a folder.

    If the tests run without root, its driver lets any user suspend; a real one lets only root.
    """

    def __init__(self, folder: Path, spec: str = "2xH100-80GB,host=512GiB") -> None:
        if os.geteuid() != 0 and "checkpoint=" not in spec:
            spec += ",checkpoint=any-uid"
        self.folder = folder
        self.spec = spec
        self.state_path = folder / "gpu-state"
        self._library = _control()
        saved = os.environ.get("GPUSHARE_SIMULATE")
        os.environ["GPUSHARE_SIMULATE"] = spec
        try:
            if self._library.gpushare_sim_attach(os.fsencode(self.state_path)):
                raise ValueError(f"not a machine: {spec}")
        finally:
            if saved is None:
                del os.environ["GPUSHARE_SIMULATE"]
            else:
                os.environ["GPUSHARE_SIMULATE"] = saved

    def env(self, **more: str) -> dict[str, str]:
        """Return the environment of a process that uses this machine and no other GPU."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "GPUSHARE_", "LD_"))}
        # tests/conftest.py finds processes that outlive the run by this variable.
        env |= {k: v for k, v in os.environ.items() if k == "GPUSHARE_TEST_RUN"}
        env |= {
            "GPUSHARE_SIMULATE": self.spec,
            "GPUSHARE_SIM_STATE": str(self.state_path),
            "LD_LIBRARY_PATH": str(native.sim_dir()),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        return env | more

    def _attached(self) -> ctypes.CDLL:
        assert self._library.gpushare_sim_attach(os.fsencode(self.state_path)) == 0
        return self._library

    def fault(self, kind: Fault, *, pid: int = 0, device: int = -1, count: int = 1, value: int = 0) -> None:
        """Inject a fault ``count`` times (-1: always); pid 0 and device -1 match any."""
        if self._attached().gpushare_sim_fault(int(kind), pid, device, count, value):
            raise ValueError(f"no such fault: {kind} pid={pid} device={device}")

    def faults_left(self) -> int:
        """Return the number of injected faults that have not occurred yet."""
        return int(self._attached().gpushare_sim_faults_left())

    def clear_faults(self) -> None:
        """Remove all faults: a lost device returns, and a hanging call ends."""
        self._attached().gpushare_sim_clear_faults()

    def _memory(self, device: int) -> tuple[int, int, int]:
        used, peak, total = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
        if self._attached().gpushare_sim_device_memory(
            device, ctypes.byref(used), ctypes.byref(peak), ctypes.byref(total)
        ):
            raise ValueError(f"no device {device}")
        return used.value, peak.value, total.value

    def device_used(self, device: int) -> int:
        """Return the bytes in use on a device, including contexts but not dead processes."""
        return self._memory(device)[0]

    def device_peak(self, device: int) -> int:
        """Return the maximum of bytes that were ever in use on a device."""
        return self._memory(device)[1]

    def device_total(self, device: int) -> int:
        """Return the size of a device in bytes."""
        return self._memory(device)[2]

    def host_memory(self) -> tuple[int, int]:
        """Return the total and the available bytes of simulated host memory."""
        total, available = ctypes.c_uint64(), ctypes.c_uint64()
        self._attached().gpushare_sim_host_memory(ctypes.byref(total), ctypes.byref(available))
        return total.value, available.value

    def set_host_memory(self, total_bytes: int) -> None:
        """Set the host memory of the machine."""
        self._attached().gpushare_sim_set_host_memory(ctypes.c_uint64(total_bytes))

    def uuid(self, device: int) -> str:
        """Return the UUID of a device as NVML and CUDA_VISIBLE_DEVICES spell it."""
        text = ctypes.create_string_buffer(41)
        if self._attached().gpushare_sim_uuid(device, text):
            raise ValueError(f"no device {device}")
        return text.value.decode()

    def group(self, device: int, path: Path) -> tuple[int, int] | None:
        """Return the soft and the hard limit of a cgroup on a device in bytes, or None without a limit."""
        soft, hard = ctypes.c_uint64(), ctypes.c_uint64()
        unlimited = self._attached().gpushare_sim_group(
            device, os.fsencode(path), ctypes.byref(soft), ctypes.byref(hard)
        )
        return None if unlimited else (soft.value, hard.value)

    def limit_host_memory(self, path: Path, max_bytes: int) -> None:
        """Limit the simulated host memory of a cgroup, as its ``memory.max`` does."""
        if self._attached().gpushare_sim_host_group(os.fsencode(path), ctypes.c_uint64(max_bytes)):
            raise ValueError(f"no such cgroup: {path}")

    def process_state(self, pid: int) -> int:
        """Return the checkpoint state of a process (CUprocessState), or -1 if it does not use CUDA."""
        return int(self._attached().gpushare_sim_process_state(pid))

    def served_s(self, pid: int, device: int = 0) -> float:
        """Return the seconds of a device's time that a living process has received."""
        ns = ctypes.c_uint64()
        if self._attached().gpushare_sim_served(pid, device, ctypes.byref(ns)):
            raise ValueError(f"no process {pid} or no device {device}")
        return ns.value / 1e9

    def ledger(self) -> list[Event]:
        """Return all events, in order; the call also makes the driver notice ended processes."""
        self.device_used(0)
        path = Path(f"{self.state_path}.ledger")
        lines = path.read_text().splitlines() if path.exists() else []
        return [Event(**json.loads(line)) for line in lines]


class Lease:
    """The two files of a lease, written as the device helper does."""

    def __init__(self, folder: Path, limits: Sequence[tuple[str, int]], *, context_bytes: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.limits = list(limits)
        self.names = [uuid for uuid, _ in self.limits]
        self.context_bytes = context_bytes
        self.kept_bytes = 0  # of the limit on each device: another lease has them
        self.turn = self.ahead_us = 0
        self.write(Phase.RUNNING)
        (folder / "account").write_bytes(bytes(ACCOUNT_BYTES))

    def set_turn(self, turn: int, ahead_us: int = 20_000) -> None:
        """Set the turn of the lease (0: none; odd: held), and wake waiting threads."""
        self.turn, self.ahead_us = turn, ahead_us
        LeaseDirectory(self.folder.parent, self.folder.name).set_turn(turn, ahead_us)

    def write(self, phase: Phase) -> None:
        """Write the whole limit page in place, as one pwrite."""
        page = bytearray(PAGE_BYTES)
        mig = sum(1 << index for index, (uuid, _) in enumerate(self.limits) if uuid.startswith("MIG-"))
        values = PAGE_MAGIC, VERSION, len(self.limits), mig, self.ahead_us, phase, self.turn
        PAGE_HEADER.pack_into(page, 0, *values)
        for index, ((uuid, limit_bytes), name) in enumerate(zip(self.limits, self.names, strict=True)):
            raw, first = (bytes.fromhex(each[4:].replace("-", "")) for each in (uuid, name))
            at = PAGE_HEADER.size + index * PAGE_DEVICE.size
            PAGE_DEVICE.pack_into(page, at, raw, limit_bytes, self.context_bytes, first, self.kept_bytes)
        fd = os.open(self.folder / "limit", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.pwrite(fd, page, 0)
        finally:
            os.close(fd)

    def keep(self, kept_bytes: int) -> None:
        """Keep bytes of the lease's limits for another lease."""
        self.kept_bytes = kept_bytes
        for index in range(len(self.limits)):
            LeaseDirectory(self.folder.parent, self.folder.name).set_kept(index, kept_bytes)

    def move(self, *uuids: str) -> None:
        """Replace the devices of the lease; their names do not change."""
        self.limits = [(uuid, limit) for uuid, (_, limit) in zip(uuids, self.limits, strict=True)]
        self.write(Phase.RUNNING)

    def env(self, name: str = "ada/") -> dict[str, str]:
        """Return the variables that a process of the lease has in addition to those of the machine."""
        return {
            "GPUSHARE_LEASE": name,
            "GPUSHARE_LEASE_DIR": str(self.folder),
            "GPUSHARE_MEMORY_LIMIT": str(sum(limit for _, limit in self.limits)),
            "LD_PRELOAD": str(native.preload_path()),
        }

    def slots(self) -> dict[int, Slot]:
        """Return the entries of the account by pid."""
        data = (self.folder / "account").read_bytes()
        found = {}
        for index in range(SLOTS):
            pid, taints, ticks, work, calls, queries, again, wants, settled, waiting, looking, *used = (
                SLOT.unpack_from(data, ACCOUNT_HEADER.size + index * SLOT.size)
            )
            if pid:
                calls += work + again
                turns = settled, waiting, looking
                found[pid] = Slot(pid, taints, ticks, work, calls, queries, tuple(used), *turns, again, wants)
        return found

    def denied(self) -> int:
        """Return the number of allocations that the limit refused."""
        return int(ACCOUNT_HEADER.unpack_from((self.folder / "account").read_bytes())[2])


@dataclass(frozen=True, slots=True)
class Slot:
    """The entry of one process in the account."""

    pid: int
    taints: int
    start_ticks: int
    work: int  # launches, copies, allocations, synchronization
    calls: int  # every call that may wait, including work
    queries: int  # calls that programs poll
    used_bytes: tuple[int, ...]
    settled: int  # the value of `work` and `again` when the device had finished all work
    waiting: int  # threads that wait for a turn
    looking: int
    again: int  # calls that waited, counted again
    wants_memory: int  # grows while a call waits for kept bytes
