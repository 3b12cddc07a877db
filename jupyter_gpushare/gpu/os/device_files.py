"""Access to the device files of GPUs (``/dev/nvidiaN``): who may open them, and what enforces that.

NVIDIA's driver creates the files with mode 0666, so that every user may open every GPU.  With
``--own-device-files`` the helper closes them.  It then admits the users of each device, by what the
file system allows:

    access list  root and the users of the device (system.posix_acl_access, acl(5))
    owner        without access lists, one user: that user owns the file, mode 0600
    none         without access lists, several users: mode 0666

Without the option the helper only reads the modes.  A file that a process has open stays open.
The user of a suspended lease stays admitted: cuInit of a new process does not wait until the lease wakes.

``nvidiactl`` and ``nvidia-uvm`` stay as they are, because CUDA needs them for every user.  Slurm and LSF
constrain only the files of GPUs; from that we infer that the other two files give no memory of a GPU.
The driver's libraries may start nvidia-modprobe as root, which sets mode and owner again (mknod_helper
in modprobe-utils/nvidia-modprobe-utils.c of NVIDIA/nvidia-modprobe) unless the module's parameter
ModifyDeviceFiles is 0 (kernel-open/nvidia/nv-reg.h of NVIDIA/open-gpu-kernel-modules).  So each sample
checks the files again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import struct
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.os.files import write_whole

log = logging.getLogger(__name__)

_ACL = "system.posix_acl_access"
# linux/posix_acl_xattr.h: version, then tag, permissions and id of each entry, ascending by tag and id.
_HEAD, _ENTRY, _VERSION, _NO_ID = struct.Struct("<I"), struct.Struct("<HHI"), 2, 0xFFFFFFFF
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ_WRITE = 6
# Of each process, at most this many descriptors are read.
DESCRIPTORS = 1024
_WITHOUT_LISTS = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class Rights:
    """Owner, mode and access list of a file; the list is hexadecimal, and empty if there is none."""

    uid: int
    gid: int
    mode: int
    acl: str = ""

    @classmethod
    def of(cls, path: Path) -> Rights:
        """Return the rights of a file.

        Raises:
            OSError: the file is missing.
        """
        found, acl = path.stat(), b""
        with contextlib.suppress(OSError):
            acl = os.getxattr(path, _ACL)
        return cls(found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode), acl.hex())

    def put(self, path: Path) -> None:
        """Set these rights on a file.

        Raises:
            OSError: the file is missing, or its file system refuses them.
        """
        found = path.stat()
        if (found.st_uid, found.st_gid) != (self.uid, self.gid):
            os.chown(path, self.uid, self.gid)
        if self.acl:
            os.setxattr(path, _ACL, bytes.fromhex(self.acl))
        else:
            with contextlib.suppress(OSError):
                os.removexattr(path, _ACL)
        path.chmod(self.mode)


def _access_list(users: Collection[int]) -> str:
    """Return the access list, in hexadecimal, that admits the owner and ``users``."""
    entries = [(_OWNER, _READ_WRITE, _NO_ID), *((_USER, _READ_WRITE, uid) for uid in sorted(users))]
    entries += [(_GROUP, 0, _NO_ID), (_MASK, _READ_WRITE, _NO_ID), (_OTHER, 0, _NO_ID)]
    return (_HEAD.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)).hex()


@dataclass(frozen=True, slots=True)
class FileAccess:
    """Who may open a device's file: ``by`` names what enforces it, or ``reason`` says why every user may."""

    by: str = ""
    reason: str = ""


class DeviceFiles:
    """The device files of this machine; safe to use from several threads."""

    def __init__(
        self, folder: Path | None, gpus: Collection[DriverGpu], saved: Path, boot_id: str, owns: bool
    ):
        """``folder`` is /dev, or None where there are no device files (the simulated driver).

        The file ``saved`` keeps the rights that the device files had before, until `restore`.
        """
        self._owns = owns
        self._saved, self._boot_id = saved, boot_id
        self._paths = {gpu.uuid: folder / f"nvidia{gpu.minor}" for gpu in gpus} if folder else {}
        # Paths as processes see them, also in a container.  The simulated driver has its state file instead.
        simulated = os.environ.get("GPUSHARE_SIM_STATE", "")
        self._names = {f"/dev/{path.name}" for path in self._paths.values()}
        self._names |= {os.path.realpath(simulated)} if simulated else set()
        self._guard = threading.Lock()
        self._users: Mapping[str, Collection[int]] = {}
        # The devices that are being tested, and the uid of the test.
        self._tested: tuple[Collection[str], int] | None = None
        self._seen: dict[Path, tuple[tuple[int, int], Rights]] = {}
        self._access: dict[str, FileAccess] = {}
        self._originals = self._load()
        if not owns:
            self.restore()

    @property
    def are_closed(self) -> bool:
        """Whether this helper admits only the given users."""
        return self._owns

    def access(self, uuid: str) -> FileAccess:
        """Return who may open the file of a device, as of the last check."""
        return self._access.get(uuid, FileAccess())

    def are_open_in(self, pid: int) -> bool:
        """Return whether a process has a device file open, or more than `DESCRIPTORS` files.

        Only names are read, so that the caller never waits for a user's file system.

        Raises:
            OSError: no descriptor or memory is free.
        """
        numbers = procfs.descriptors(pid, DESCRIPTORS + 1)
        return len(numbers) > DESCRIPTORS or any(
            procfs.opened(pid, number) in self._names for number in numbers
        )

    def admit(self, users: Mapping[str, Collection[int]]) -> None:
        """Admit these uids, by device, and no others; without ``owns`` only check the files."""
        with self._guard:
            self._users = users
            self._apply()

    @contextmanager
    def tested_by(self, uuids: Collection[str], uid: int) -> Iterator[None]:
        """Admit a user for the self-test of these devices."""
        with self._guard:
            self._tested = uuids, uid
            self._apply()
        try:
            yield
        finally:
            with self._guard:
                self._tested = None
                self._apply()

    def restore(self) -> None:
        """Restore the rights that the files had before the first helper of this boot closed them."""
        with self._guard:
            self._owns = False
            for path, rights in self._originals.items():
                try:
                    rights.put(path)
                except OSError as error:
                    log.warning("%s keeps its rights: %s", path, error.strerror)
            self._originals = {}
            self._saved.unlink(missing_ok=True)

    def _apply(self) -> None:
        for path in set(self._paths.values()):
            uuids = [uuid for uuid, each in self._paths.items() if each == path]
            try:
                access = self._close(path, uuids) if self._owns else _check(path)
            except OSError as error:
                access = FileAccess(reason=f"{path} cannot be closed to other users: {error.strerror}")
            if access != self._access.get(uuids[0]):
                log.info("%s: %s", path, access.reason or f"closed by {access.by}")
            self._access |= dict.fromkeys(uuids, access)

    def _close(self, path: Path, uuids: list[str]) -> FileAccess:
        found, lists = path.stat(), _has_lists(path)
        users = {uid for uuid in uuids for uid in self._users.get(uuid, ())}
        if lists and self._tested is not None and not set(uuids).isdisjoint(self._tested[0]):
            users.add(self._tested[1])
        wanted = _closed(users - {0, os.geteuid()}, lists)
        mark = found.st_ino, found.st_ctime_ns
        if (mark, wanted) != self._seen.get(path):
            before = Rights.of(path)
            if path not in self._originals:
                self._save(self._originals | {path: before})
            elif path in self._seen and before != self._seen[path][1]:
                log.warning("%s was opened to others (mode %04o): it is closed again", path, before.mode)
            wanted.put(path)
            found = path.stat()
            self._seen[path] = (found.st_ino, found.st_ctime_ns), wanted
        if wanted.mode & 0o006:
            return FileAccess(
                reason=f"the file system of {path} has no access lists, and several users need it"
            )
        return FileAccess(by=f"{'the access list' if lists else 'the owner'} of {path}")

    def _load(self) -> dict[Path, Rights]:
        try:
            written = json.loads(self._saved.read_bytes())
            if written["boot_id"] != self._boot_id:
                return {}
            return {Path(path): Rights(**rights) for path, rights in written["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _save(self, originals: dict[Path, Rights]) -> None:
        files = {str(path): asdict(rights) for path, rights in originals.items()}
        write_whole(self._saved, json.dumps({"boot_id": self._boot_id, "files": files}).encode())
        self._originals = originals


def _closed(users: set[int], lists: bool) -> Rights:
    uid, gid = os.geteuid(), os.getegid()
    if not users:
        return Rights(uid, gid, 0o600)
    if lists:
        return Rights(uid, gid, 0o660, _access_list(users))
    return Rights(users.pop(), gid, 0o600) if len(users) == 1 else Rights(uid, gid, 0o666)


def _has_lists(path: Path) -> bool:
    try:
        os.getxattr(path, _ACL)
    except OSError as error:
        return error.errno not in _WITHOUT_LISTS
    return True


def _check(path: Path) -> FileAccess:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        return FileAccess(reason=f"{path} is not there: {error.strerror}")
    if mode & 0o006:
        return FileAccess(reason=f"{path} is open to every user (mode {mode:04o}): see --own-device-files")
    return FileAccess(by=f"the mode of {path} ({mode:04o})")
