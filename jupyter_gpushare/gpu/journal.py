"""What the helper must still know after it was killed: the state directory.

    <state dir>/               0711
        leases/<lease>/        limit page and account, see `isolation`
        private/               0700
            lock               held while a helper runs here: there is only one
            epoch              the highest epoch ever seen, written before its effect
            canary             which devices passed the self-test, for this boot and driver
            journal/<lease>    one record per lease, written before and after each step

The journal holds what the driver cannot be asked: whose a lease is, its limits,
which processes are being moved and how many bytes they left behind.  Where they
are is asked from the driver (GetState), never read from here.

Every file is replaced as a whole.  Only the epoch is synced to disk: it must
outlive a power cut.  Device memory, and with it everything else here, does not;
a record of an earlier boot is worthless and is removed with its lease.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import HelperError, InvalidRequest
from . import verbs
from .isolation import check_lease
from .verbs import ErrorKind, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """A process that is being moved or is suspended, and what it holds by device."""

    pid: int
    start_ticks: int
    saved_bytes: dict[str, int]
    core_filter: int = -1  # /proc/PID/coredump_filter before it was suspended; -1: not changed

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start_ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One lease, as it is written down."""

    boot_id: str
    lease: str
    uid: int
    limits: dict[str, int]
    phase: Phase
    parked: tuple[Parked, ...] = ()
    lost: tuple[Parked, ...] = ()
    guaranteed: dict[str, int] = field(default_factory=dict)
    # Counters at the moment of suspension: "PID:START" -> "CALLS:QUERIES"; None: not known.
    counted: dict[str, str] = field(default_factory=dict)


class StateDirectory:
    """The state directory, locked for this process."""

    def __init__(self, path: Path) -> None:
        """Make and lock the directory.

        Raises:
            HelperError: another helper runs on it (kind ``running``), or it
                cannot be used (kind ``state``).
        """
        self.path = path
        self.leases = path / "leases"
        self._private = path / "private"
        self._journal = self._private / "journal"
        try:
            for folder, mode in (
                (path, 0o711),
                (self.leases, 0o711),
                (self._private, 0o700),
                (self._journal, 0o700),
            ):
                folder.mkdir(parents=True, exist_ok=True)
                folder.chmod(mode)
            self._lock_fd = os.open(self._private / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HelperError("state", f"the state directory {path} cannot be used: {error}") from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock_fd, 32, 0).decode(errors="replace").strip() or "?"
            os.close(self._lock_fd)
            raise HelperError(
                "running", f"another device helper (process {holder}) already works on {path}"
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        self.epoch = self._read_epoch()

    def close(self) -> None:
        """Let another helper work here."""
        os.close(self._lock_fd)

    def raise_epoch(self, epoch: int) -> None:
        """Remember an epoch, on disk before this returns.

        Raises:
            HelperError: it is below the highest one (kind ``stale_epoch``).
        """
        if epoch < self.epoch:
            raise HelperError(ErrorKind.STALE_EPOCH, f"epoch {epoch} is stale: {self.epoch} has been seen")
        if epoch > self.epoch:
            _replace(self._private / "epoch", f"{epoch}\n".encode(), sync=True)
            self.epoch = epoch

    def save(self, record: Record) -> None:
        """Write one lease down."""
        _replace(self._journal / record.lease, json.dumps(asdict(record)).encode())

    def forget(self, lease: str) -> None:
        """Remove the record of a lease."""
        (self._journal / lease).unlink(missing_ok=True)

    def records(self, boot_id: str) -> tuple[Record, ...]:
        """The leases of this boot; what an earlier boot or a power cut left is removed.

        Raises:
            HelperError: a lease of this boot cannot be read (kind ``state``): it may sleep,
                so it is not forgotten.
        """
        found = []
        for path in sorted(self._journal.iterdir()):
            record = _read_record(path, boot_id)
            if record is not None:
                found.append(record)
            else:
                path.unlink()
        return tuple(found)

    def save_canary(self, verdicts: dict[str, Any]) -> None:
        """Keep the self-test's verdicts."""
        _replace(self._private / "canary", json.dumps(verdicts).encode())

    def canary(self) -> dict[str, Any]:
        """The verdicts kept last; empty when there are none."""
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
            # To start again from 0 would let every stale broker in.
            raise HelperError(
                "state", f"{self._private / 'epoch'} is damaged; write the broker's epoch into it"
            ) from None


def _read_record(path: Path, boot_id: str) -> Record | None:
    """The record in a file; None: it is none, cut short, or of another boot."""
    try:
        check_lease(path.name)
        written = verbs.decode(path.read_bytes())
    except OSError as error:
        raise HelperError("state", f"{path} cannot be read: {error.strerror}") from None
    except InvalidRequest:
        return None
    if written.get("boot_id") != boot_id or written.get("lease") != path.name:
        return None
    try:
        return verbs.build(Record, written)
    except InvalidRequest as error:
        raise HelperError(
            "state",
            f"{path} was written by another version ({error}): start that version of the helper again, or "
            "remove the file, and what sleeps in this lease is lost",
        ) from None


def _replace(path: Path, content: bytes, sync: bool = False) -> None:
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    new.rename(path)
    if sync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
