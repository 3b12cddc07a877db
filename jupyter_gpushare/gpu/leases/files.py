"""The two files of a lease, as the preload library shares them with the helper.

native/gpushare_lease.h defines the same layout; tests compare the two.

* ``limit`` belongs to the helper: written whole under another name and renamed,
  changed field by field with pwrite, so that a process that has it mapped sees each
  field either old or new.  The lease's user cannot write it.
* ``account`` belongs to the user: mapped and written by every process of the lease.
  The user can replace it by anything: a shorter file, a FIFO, a link, false counts, a mutex that stays
  locked, or a FUSE filesystem mounted on it that never answers.  So the helper opens it only as a regular
  file on its own filesystem, reads a fixed number of bytes with pread, and never maps it (a truncated map
  kills the reader), locks it or follows a link.  It truncates an account that has grown, which would fill
  the file system.  The content is used only for the account's own lease: to notice that the user wants the
  GPU, and to explain.  The safety of other leases never depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import mmap
import os
import platform
import re
import shutil
import struct
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from jupyter_gpushare import procfs
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.gpu.os.files import open_regular, write_whole
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol import LIMIT_NAME

DEVICES = 16
SLOTS = 256
VERSION = 5
LIMIT_MAGIC = 0x4C535047
ACCOUNT_MAGIC = 0x41535047

ACCOUNT_NAME = "account"

# A turn in the limit page is NO_TURNS, or twice the number of the change, plus HELD where launches wait.
NO_TURNS = 0
HELD = 1

# struct gpushare_limit_page
LIMIT_HEAD = struct.Struct("<IIHHIII")  # magic, version, device_count, mig, ahead_us, phase, turn
LIMIT_DEVICE = struct.Struct("<16sQQ16sQ")  # uuid, limit_bytes, context_bytes, name, kept_bytes
LIMIT_BYTES = LIMIT_HEAD.size + DEVICES * LIMIT_DEVICE.size
COUNT_AT = 8
AHEAD_AT = 12
PHASE_AT = 16
TURN_AT = 20
LIMIT_IN_DEVICE = 16
CONTEXT_IN_DEVICE = 24
NAME_IN_DEVICE = 32
KEPT_IN_DEVICE = 48

# struct gpushare_account
ACCOUNT_HEAD = struct.Struct("<IIQ64x")  # magic, version, denied, lock
# pid, taints, start_ticks, work, calls, queries, again, wants_memory, settled, waiting, looking
SLOT = struct.Struct(f"<iIQQQQQQQII{8 * DEVICES}x")
SLOT_USED = struct.Struct(f"<{DEVICES}Q")
USED_IN_SLOT = 72
ACCOUNT_BYTES = ACCOUNT_HEAD.size + SLOTS * SLOT.size

# futex(2) wakes the threads that wait for a turn.  On other machines they check every 20 ms.
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAKE = 1
_ALL = (1 << 31) - 1
_syscall = ctypes.CDLL(None).syscall

_LEASE = re.compile(r"[a-z0-9-]{1,64}")


class PagePhase(enum.IntEnum):
    """enum gpushare_phase: what the processes of a lease may do."""

    RUNNING = 0
    SUSPENDING = 1
    SUSPENDED = 2
    PAUSED = 3
    REVOKED = 4


class Taint(enum.IntFlag):
    """enum gpushare_taint: what makes a process not suspendable."""

    MANAGED = 1
    IPC = 2
    EXPORTED = 4
    PEER = 8
    TRACED = 16
    FABRIC = 32


TAINT_WORDS = {
    Taint.MANAGED: "managed memory",
    Taint.IPC: "CUDA IPC",
    Taint.EXPORTED: "memory shared with another process or with graphics",
    Taint.PEER: "peer access between GPUs",
    Taint.TRACED: "tracing with CUPTI (torch.profiler)",
    Taint.FABRIC: "memory with fabric handles",
}

_ALL_TAINTS = sum(Taint)


@dataclass(frozen=True, slots=True)
class Slot:
    """The entry of one process in the account."""

    taints: Taint
    work: int  # launches, copies, allocations, synchronisation, each once
    again: int  # calls that waited, counted again while they wait and when they continue
    calls: int  # every call that may wait while suspended, both of these included
    queries: int  # calls that programs poll: streams, events, pointers, contexts, captures
    used_bytes: tuple[int, ...]  # by index in the limit page
    writer: Key  # the key that the process wrote itself; it never changes


class TurnSlot(NamedTuple):
    """The part of a process's entry that decides about turns."""

    key: Key  # as this process names it
    wants_memory: int  # grows while a call of it waits for bytes that are kept for another lease
    work: int  # calls, counted again when they continue after a wait
    settled: int  # the number of calls at which nothing of it was left on a device
    waiting: int  # threads that wait for a turn
    looking: int  # 1: the library's own thread is in the driver


@dataclass(frozen=True, slots=True)
class AccountFile:
    """The account of a lease."""

    denied: int
    slots: Mapping[Key, Slot]  # by process, as this process names it

    def held(self) -> dict[Key, tuple[int, ...]]:
        """Return the bytes of each process by device index."""
        return {key: slot.used_bytes for key, slot in self.slots.items()}

    def counters(self) -> Counters:
        """Return the counters by the key that each process wrote itself.

        A counter outlives its process, but the host's pid of a process in a pid namespace is known only
        while the process lives; the written key stays the same.
        """
        slots = self.slots.values()
        return Counters(
            {slot.writer: (slot.calls, slot.queries) for slot in slots},
            {slot.writer: slot.work + slot.again for slot in slots},
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """The numbers of CUDA calls that each process entered, by the key that it wrote itself.

    ``entered`` has (calls, queries) and shows whether a process may wait.  ``worked`` shows whether it
    works: it has only launches, copies, allocations and synchronisation, which count as calls too.
    """

    entered: Mapping[tuple[int, int], tuple[int, int]]
    worked: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def token(self) -> str:
        """Return an opaque token that changes when a call is entered; queries do not count."""
        text = ",".join(
            f"{pid}:{start}:{calls}" for (pid, start), (calls, _) in sorted(self.entered.items()) if calls
        )
        return "c" + blake2b(text.encode(), digest_size=12).hexdigest()

    def calls_since(self, before: Counters) -> bool:
        """Return whether a process entered a CUDA call after ``before``; ended processes do not count."""
        return any(
            calls != before.entered.get(process, (0, 0))[0] for process, (calls, _) in self.entered.items()
        )

    def worked_since(self, before: Counters) -> bool:
        """Return whether a process launched, copied, allocated or synchronised after ``before``."""
        return any(work != before.worked.get(process, 0) for process, work in self.worked.items())

    def queries_since(self, before: Counters) -> bool:
        """Return whether a process queried the state of a stream or event after ``before``."""
        return any(
            queries != before.entered.get(process, (0, 0))[1]
            for process, (_, queries) in self.entered.items()
        )


NO_COUNTERS = Counters({})


def counters_of(account: AccountFile | None) -> Counters:
    """Return the counters of an account; none of a broken one."""
    return account.counters() if account else NO_COUNTERS


def check_lease(lease: str) -> str:
    """Return the lease's name if it can be the name of a directory.

    Raises:
        InvalidRequest: it is not ``[a-z0-9-]{1,64}``.
    """
    if not _LEASE.fullmatch(lease):
        raise InvalidRequest(f"a lease is named [a-z0-9-]{{1,64}}, not {lease[:80]!r}")
    return lease


def uuid_bytes(uuid: str) -> bytes:
    """Return the 16 bytes of ``GPU-...`` or ``MIG-...`` as cuDeviceGetUuid_v2 returns them.

    Raises:
        InvalidRequest: it is not such a name.
    """
    _kind, _dash, digits = uuid.partition("-")
    try:
        raw = bytes.fromhex(digits.replace("-", ""))
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raise InvalidRequest(f"not the UUID of a device: {uuid[:80]!r}")
    return raw


def parse_account(raw: bytes) -> AccountFile | None:
    """Return the account in these bytes of its file; None if they are no account."""
    if len(raw) != ACCOUNT_BYTES:
        return None
    magic, version, denied = ACCOUNT_HEAD.unpack_from(raw)
    if magic == 0:
        return AccountFile(0, {})  # no process has finished opening it yet
    if magic != ACCOUNT_MAGIC or version != VERSION:
        return None
    slots: dict[Key, Slot] = {}
    at = ACCOUNT_HEAD.size
    for pid, taints, start_ticks, work, calls, queries, again, *_ in SLOT.iter_unpack(memoryview(raw)[at:]):
        if pid > 0:
            used = SLOT_USED.unpack_from(raw, at + USED_IN_SLOT)
            known = Taint(taints & _ALL_TAINTS)
            key = (pid, start_ticks)
            slots[key] = Slot(known, work, again, work + again + calls, queries, used, key)
        at += SLOT.size
    return AccountFile(denied, slots)


class LeaseDirectory:
    """The directory of one lease: creates it, changes the limit page, reads the account."""

    def __init__(self, root: Path, lease: str) -> None:
        self.path = root / check_lease(lease)
        self._limit = self.path / LIMIT_NAME
        self._account = self.path / ACCOUNT_NAME
        self._account_fd = -1
        self._turn_bytes = SLOT.size * SLOTS  # bytes of the account that `turn_slots` reads
        self._page: mmap.mmap | None = None  # the limit page, for the address of the turn alone
        # The key on the host, by the key that a process in a pid namespace writes.
        self._host_keys: dict[Key, Key] = {}
        # The sampling and the waking thread share the descriptor.
        self._guard = threading.Lock()

    def create(
        self,
        uid: int,
        limits: Mapping[str, int],
        phase: PagePhase,
        contexts: Mapping[str, int] = MappingProxyType({}),
        names: Iterable[str] = (),
        ahead_us: int = 0,
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Create the directory with a limit page and an account owned by ``uid``.

        ``limits``, ``contexts`` and ``kept`` are bytes by device: ``contexts`` are charged from the start;
        another lease has ``kept`` for now.  ``names`` are the UUIDs by which processes know the devices, in
        their order (default: the devices' own).  ``ahead_us`` is above 0 if the processes may get turns.

        An existing account is kept.  An existing page is replaced as a whole: no process may carry the
        lease then.

        Raises:
            OSError: it cannot be written.
        """
        self.path.mkdir(mode=0o755, exist_ok=True)
        self.path.chmod(0o755)
        page = bytearray(LIMIT_BYTES)
        mig = sum(1 << index for index, uuid in enumerate(limits) if uuid.startswith("MIG-"))
        LIMIT_HEAD.pack_into(page, 0, LIMIT_MAGIC, VERSION, len(limits), mig, ahead_us, phase, NO_TURNS)
        for index, (uuid, name) in enumerate(zip(limits, tuple(names) or limits, strict=True)):
            at = LIMIT_HEAD.size + index * LIMIT_DEVICE.size
            values = uuid_bytes(uuid), limits[uuid], contexts.get(uuid, 0), uuid_bytes(name)
            LIMIT_DEVICE.pack_into(page, at, *values, kept.get(uuid, 0))
        write_whole(self._limit, bytes(page), 0o644)
        self._page = None
        if not os.path.lexists(self._account):
            head = ACCOUNT_HEAD.pack(0, 0, 0)
            write_whole(self._account, head.ljust(ACCOUNT_BYTES, b"\0"), uid=uid)

    def owner(self) -> int:
        """Return the uid of the lease, from the owner of its account, which only root can change.

        Raises:
            OSError: there is no account.
        """
        return os.lstat(self._account).st_uid

    def set_phase(self, phase: PagePhase) -> None:
        """Write what the processes of the lease may do; while their calls wait, they have no turns.

        Raises:
            OSError: the page is missing.
        """
        runs = phase in (PagePhase.RUNNING, PagePhase.PAUSED)
        self._pwrite(
            struct.pack("<I" if runs else "<II", *((phase,) if runs else (phase, NO_TURNS))), PHASE_AT
        )
        if not runs:
            self._wake()

    def set_turn(self, turn: int, ahead_us: int) -> None:
        """Write the turn of the lease and the microseconds of work that may be in flight; wake its threads.

        Raises:
            OSError: the page is missing.
        """
        self._pwrite(struct.pack("<I", ahead_us), AHEAD_AT)
        self._pwrite(struct.pack("<I", turn), TURN_AT)
        self._wake()

    def set_limit(self, index: int, limit_bytes: int) -> None:
        """Change the limit on the device at ``index`` of the page.

        Raises:
            OSError: the page is missing.
        """
        self._pwrite(struct.pack("<Q", limit_bytes), _device_at(index) + LIMIT_IN_DEVICE)

    def set_kept(self, index: int, kept_bytes: int) -> None:
        """Write the bytes of the limit on a device that another lease has for now.

        Raises:
            OSError: the page is missing.
        """
        self._pwrite(struct.pack("<Q", kept_bytes), _device_at(index) + KEPT_IN_DEVICE)

    def set_devices(self, uuids: Iterable[str]) -> None:
        """Write the UUIDs of the lease's devices, in their order; the names that processes know stay.

        Raises:
            OSError: the page is missing.
        """
        for index, uuid in enumerate(uuids):
            self._pwrite(uuid_bytes(uuid), _device_at(index))

    def set_context(self, index: int, context_bytes: int) -> None:
        """Charge the bytes of contexts, which the driver shows in addition to the account.

        Raises:
            OSError: the page is missing.
        """
        self._pwrite(struct.pack("<Q", context_bytes), _device_at(index) + CONTEXT_IN_DEVICE)

    def phase(self) -> PagePhase | None:
        """Return the phase in the limit page; None if the page is missing or broken."""
        if (fd := open_regular(self._limit)) < 0:
            return None
        try:
            head = os.pread(fd, LIMIT_HEAD.size, 0)
        finally:
            os.close(fd)
        if len(head) != LIMIT_HEAD.size or LIMIT_HEAD.unpack(head)[:2] != (LIMIT_MAGIC, VERSION):
            return None
        value = LIMIT_HEAD.unpack(head)[-2]
        return PagePhase(value) if value in iter(PagePhase) else None

    def raw_account(self) -> bytes:
        """Return the bytes of the account opened last; fewer than `ACCOUNT_BYTES` if it is broken."""
        with self._guard:
            if self._account_fd < 0:
                return b""
            try:
                return os.pread(self._account_fd, ACCOUNT_BYTES, 0)
            except OSError:
                return b""

    def turn_slots(self, *, all_slots: bool = False) -> list[TurnSlot]:
        """Return the entries of the account opened last, including those of ended processes.

        This runs hundreds of times a second.  Without ``all_slots`` it reads the entries in use and some
        more, so that it may miss a new process until the next sample.
        """
        with self._guard:
            if self._account_fd < 0:
                return []
            try:
                size = SLOT.size * SLOTS if all_slots else self._turn_bytes
                raw = os.pread(self._account_fd, size, ACCOUNT_HEAD.size)
            except OSError:
                return []
        found, used, names = [], 0, self._host_keys
        whole = raw[: len(raw) - len(raw) % SLOT.size]
        for index, (pid, _, ticks, work, _, _, again, wants, *turns) in enumerate(SLOT.iter_unpack(whole)):
            if pid > 0:
                used = index + 1
                found.append(TurnSlot(names.get((pid, ticks), (pid, ticks)), wants, work + again, *turns))
        self._turn_bytes = SLOT.size * min(SLOTS, 2 * used + 8)
        return found

    def reopen(self) -> None:
        """Open the account again, because its user may have replaced it."""
        fd = open_regular(self._account)
        if fd >= 0:
            _cut(fd)
        with self._guard:
            old, self._account_fd = self._account_fd, fd
            self._turn_bytes = SLOT.size * SLOTS
        if old >= 0:
            os.close(old)

    def account(self) -> AccountFile | None:
        """Return the account as it is now; None if it is broken."""
        self.reopen()
        return self.parse(self.raw_account())

    def parse(self, raw: bytes) -> AccountFile | None:
        """Return the account in these bytes, with the host's pids of processes; None if it is broken."""
        account, keys = parse_account(raw), self._host_keys
        if account is None or not keys:
            return account
        return replace(account, slots={keys.get(key, key): slot for key, slot in account.slots.items()})

    def know(self, keys: Mapping[Key, Key]) -> None:
        """Note the key of each living process by the key that it writes into the account.

        Keys of ended processes are kept while there is space, because their slots stay.
        """
        both = self._host_keys | {inner: key for inner, key in keys.items() if inner != key}
        surplus = len(both) - 2 * SLOTS
        self._host_keys = {k: v for n, (k, v) in enumerate(both.items()) if n >= surplus or k in keys}

    def close(self) -> None:
        """Close the account and the limit page."""
        self._page = None
        with self._guard:
            old, self._account_fd = self._account_fd, -1
        if old >= 0:
            os.close(old)

    def revoke(self) -> None:
        """Deny every allocation from now on, and remove the files."""
        if self._limit.is_file():
            self.set_phase(PagePhase.REVOKED)
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _wake(self) -> None:
        """Wake all threads that wait for a turn.  The mapping is never read, as the file may be shorter."""
        if _SYS_FUTEX is None:
            return
        if (page := self._page) is None:
            if (fd := open_regular(self._limit, os.O_RDWR)) < 0:
                return
            try:
                page = self._page = mmap.mmap(fd, LIMIT_BYTES)
            except (OSError, ValueError):
                return
            finally:
                os.close(fd)
        turn = ctypes.c_uint32.from_buffer(page, TURN_AT)
        _syscall(_SYS_FUTEX, ctypes.c_void_p(ctypes.addressof(turn)), _FUTEX_WAKE, _ALL, None, None, 0)

    def _pwrite(self, value: bytes, at: int) -> None:
        if (fd := open_regular(self._limit, os.O_WRONLY)) < 0:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._limit))
        try:
            os.pwrite(fd, value, at)
        finally:
            os.close(fd)


def words_of(taints: Iterable[Taint]) -> str:
    """Return taints in words, such as "managed memory, CUDA IPC"; empty if there are none."""
    found = Taint(0)
    for taint in taints:
        found |= taint
    return ", ".join(word for taint, word in TAINT_WORDS.items() if taint in found)


def _device_at(index: int) -> int:
    if not 0 <= index < DEVICES:
        raise IndexError(index)
    return LIMIT_HEAD.size + index * LIMIT_DEVICE.size


def _cut(fd: int) -> None:
    """Truncate an account that has grown, because all users share its file system.

    A user with a file lease on it (fcntl(2)) can make truncate(2) wait up to `fs.lease-break-time`, 45 s.
    With O_NONBLOCK open(2) fails at once and breaks the lease; the next call truncates the account.
    """
    found = os.fstat(fd)
    if found.st_size > ACCOUNT_BYTES and found.st_nlink == 1:
        with contextlib.suppress(OSError):
            writable = os.open(procfs.path(0, f"fd/{fd}"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.ftruncate(writable, ACCOUNT_BYTES)
            finally:
                os.close(writable)
