"""State that outlives a killed helper: the state directory and the lease directory.

    <state dir>/               0711, on disk
        private/               0700
            lock               locked while a helper runs here, so that there is only one
            epoch              the highest epoch ever seen, written before it takes effect
            canary             self-test verdicts and device states of this boot and driver
            holders            users that held a lease in this boot (`holders`)
            containers         the leases of containers in this boot (`containers`)
            unit-pool          on Kubernetes: exists while seats count by number (`seats`)
            journal/<lease>    one record per lease, written before and after each step
    <lease dir>/<lease>/       limit page and account, see `files`

The lease directory belongs in memory (/run).  Processes write their account at each CUDA call; on a
disk such a write faults at each write-back, and fails when the disk is full.  The lease directory must
outlive the helper but not the boot.  Its default is <state dir>/leases.

The journal holds what the driver does not know: the user of a lease, its limits, which processes are
being moved and how many bytes they saved.  The state of a process is always asked from the driver
(GetState), never read from the journal.

Every file is replaced as a whole.  On a full disk, a file of at most one page is overwritten instead.
That takes no further space where blocks are written in place (ext4, XFS, tmpfs), and a kill does not cut
the write of one page short.  Only the epoch is synced to disk, because it must outlive a power cut.  Device
memory does not outlive one, so nothing else here has to.  A record of an earlier boot is removed with its
lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jupyter_gpushare.errors import HelperError, InvalidRequest
from jupyter_gpushare.gpu.leases.files import check_lease
from jupyter_gpushare.gpu.leases.holders import Holders
from jupyter_gpushare.gpu.os.files import write_or_overwrite
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper import ErrorKind, Phase, SetLimit

_PID_BYTES = 32
# Self-tests make leases with this prefix for themselves; no process of a user carries one.
SELF_TEST_PREFIX = "canary-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A process that is being moved or is suspended, with the bytes that it saved by device."""

    pid: int
    start_ticks: int
    saved_bytes: dict[str, int]
    core_filter: int = -1  # /proc/PID/coredump_filter before it was suspended; -1: not changed
    out_of_step: bool = False  # lost because every driver call about it fails
    # The devices on which the driver checkpointed it, in the lease's order; empty: those of the lease.
    devices: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time, which together name one process of this boot."""
        return self.pid, self.start_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Device memory of a dead process that a process forked from it keeps (`leftovers`)."""

    pid: int
    start_ticks: int
    image: tuple[int, ...]  # `Process.image`
    held_bytes: dict[str, int]

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time, which together name one process of this boot."""
        return self.pid, self.start_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """One lease in the journal."""

    asked: SetLimit  # the last request of the broker
    phase: Phase
    parked: tuple[Parked, ...] = ()
    lost: tuple[Parked, ...] = ()
    left: tuple[Leftover, ...] = ()
    damaged: tuple[tuple[int, int], ...] = ()  # keys of processes that a failed checkpoint may have damaged
    # Counters at the moment of suspension: pid, start ticks, calls and queries of each process.
    counted: tuple[tuple[int, int, int, int], ...] = ()
    unconfirmed: bool = False
    # UUIDs by which its processes know its devices, in their order; empty: the devices' own UUIDs.
    names: tuple[str, ...] = ()
    # While it resumes on other devices: its devices before that, in their order.
    moves_from: tuple[str, ...] = ()
    ended_as_guest: bool = False  # as `LeaseSample.ended_as_guest`


class StateDirectory:
    """The state directory, locked until this process ends."""

    def __init__(self, path: Path, boot_id: str, leases: Path | None = None) -> None:
        """Create and lock the directory; ``leases`` is the lease directory (default: within ``path``).

        Raises:
            HelperError: another helper runs on it (kind ``running``), or it
                cannot be used (kind ``state``).
        """
        self.path = path
        self.boot_id = boot_id
        self.leases = leases or path / "leases"
        self._private = path / "private"
        self._journal = self._private / "journal"
        self.containers_file = self._private / "containers"
        self.unit_pool_file = self._private / "unit-pool"
        self._devices_guard = threading.Lock()
        try:
            for folder, mode in (
                (path, 0o700 if leases else 0o711),
                (self.leases, 0o711),
                (self._private, 0o700),
                (self._journal, 0o700),
            ):
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(mode)
            self._lock_fd = os.open(self._private / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HelperError(
                ErrorKind.STATE, f"the state directory {path} cannot be used: {error}"
            ) from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, _PID_BYTES, 0).decode(errors="replace").strip() or "?"
            os.close(self._lock_fd)
            raise HelperError(
                "running", f"another device helper (process {holder}) already works on {path}"
            ) from None
        with contextlib.suppress(OSError):  # a full disk; the pid only tells a second helper which one runs
            os.pwrite(self._lock_fd, str(os.getpid()).ljust(_PID_BYTES).encode(), 0)
        self.epoch = self._read_epoch()
        self.holders = Holders(self._private / "holders", boot_id)

    def raise_epoch(self, epoch: int) -> None:
        """Store an epoch; it is on disk before this returns.

        Raises:
            HelperError: it is below the highest one (kind ``stale_epoch``).
        """
        if epoch < self.epoch:
            raise HelperError(
                ErrorKind.STALE_EPOCH,
                f"epoch {epoch} is stale: a newer broker is at work (epoch {self.epoch})",
            )
        if epoch > self.epoch:
            write_or_overwrite(self._private / "epoch", f"{epoch}\n".encode(), sync=True)
            self.epoch = epoch

    def save(self, record: JournalRecord) -> None:
        """Write the record of a lease.

        Raises:
            OSError: the disk refused it.
        """
        written = {"boot_id": self.boot_id, **asdict(record)}
        write_or_overwrite(self._journal / record.asked.lease, json.dumps(written).encode())

    def forget(self, lease: str) -> None:
        """Remove the record of a lease."""
        (self._journal / lease).unlink(missing_ok=True)

    def records(self) -> dict[str, JournalRecord | None]:
        """Return the record of each file in the journal by name.

        It is None for a file that is no record of this boot: older, or cut short by a power cut.

        Raises:
            HelperError: a record of this boot cannot be read (kind ``state``).  Its lease may be suspended,
                so the record is not skipped.
        """
        return {path.name: _read_record(path, self.boot_id) for path in sorted(self._journal.iterdir())}

    def save_devices(self, saved: dict[str, Any]) -> None:
        """Write the state of the devices (`DeviceStates.saved`).

        Raises:
            OSError: the disk refused it.
        """
        with self._devices_guard:
            write_or_overwrite(self._private / "canary", json.dumps(saved).encode())

    def devices(self) -> dict[str, Any]:
        """Return what `save_devices` wrote last; empty if it wrote nothing."""
        try:
            value = json.loads((self._private / "canary").read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _read_epoch(self) -> int:
        try:
            text = (self._private / "epoch").read_text(encoding="ascii")
        except FileNotFoundError:
            return 0
        try:
            return int(text)
        except ValueError:
            # Starting again from 0 would accept every stale broker.
            raise HelperError(
                ErrorKind.STATE, f"{self._private / 'epoch'} is damaged; write the broker's epoch into it"
            ) from None


def _read_record(path: Path, boot_id: str) -> JournalRecord | None:
    """Return the record in a file; None if it is cut short, of another boot, or no record.

    Raises:
        HelperError: it is of this boot and cannot be read (kind ``state``).
    """
    try:
        check_lease(path.name)
        written = helper.decode(path.read_bytes())
    except OSError as error:
        raise HelperError(ErrorKind.STATE, f"{path} cannot be read: {error.strerror}") from None
    except InvalidRequest:
        return None
    if written.pop("boot_id", None) != boot_id:
        return None
    try:
        record = helper.build(JournalRecord, written)
        return record if record.asked.lease == path.name else None
    except InvalidRequest as error:
        raise HelperError(
            ErrorKind.STATE,
            f"{path} was written by another version ({error}): start that version of the helper again, or "
            "remove the file: what is suspended in this lease is then lost",
        ) from None
