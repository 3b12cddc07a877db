"""Open and replace files that users may replace at any time, and on a disk that may be full."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from jupyter_gpushare import procfs

# ENOSPC, and what a quota on the disk answers.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_PAGE_BYTES = 4096
_STAT_BLOCK_BYTES = 512  # stat(2), st_blocks


def open_regular(path: Path, access: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file in its folder's file system; -1 for anything else.

    A user may have put a link, a FIFO or a mount there: none of them is followed or waited for.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        # O_PATH calls no filesystem (open(2)), and fdinfo comes from the kernel's memory (proc(5)).
        folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, found)
        if _mount(found) == _mount(folder) and stat.S_ISREG(os.fstat(found).st_mode):
            return os.open(procfs.path(0, f"fd/{found}"), access | os.O_NONBLOCK | os.O_CLOEXEC)
    return -1


def _mount(fd: int) -> bytes:
    """Return the line of fdinfo (proc(5)) that numbers the mount of a descriptor."""
    lines = procfs.read(0, f"fdinfo/{fd}", 1024).splitlines()
    return next((line for line in lines if line.startswith(b"mnt_id:")), b"")


def write_whole(
    path: Path, content: bytes, mode: int = 0o600, uid: int | None = None, *, sync: bool = False
) -> None:
    """Replace a file at once, so that no reader sees a part of it.

    ``uid`` becomes its owner (default: the user of this process).  With ``sync`` the content is on disk
    before this returns.

    Raises:
        OSError: the disk refused it; the file is unchanged.
    """
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, mode)
            if uid is not None and uid != os.geteuid():
                os.fchown(fd, uid, -1)
            if sync:
                file.flush()
                os.fsync(fd)
        new.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_or_overwrite(path: Path, content: bytes, sync: bool = False) -> None:
    """Replace a file at once; on a full disk write over the old file instead, if it fits into its blocks.

    Raises:
        OSError: the disk refused it; the file is unchanged.
    """
    try:
        write_whole(path, content, sync=sync)
    except OSError as error:
        if error.errno not in _NO_SPACE or not _overwrite(path, content, sync):
            raise


def _overwrite(path: Path, content: bytes, sync: bool) -> bool:
    """Write over a file within its blocks, one page at most; return False if they cannot hold the content.

    The full disk could cut a longer write short after the old content is lost.

    Raises:
        OSError: the disk refused it.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        file = os.fstat(fd)
        if max(file.st_size, len(content)) > min(_PAGE_BYTES, _STAT_BLOCK_BYTES * file.st_blocks):
            return False
        # Blanks at the end mean nothing, so that no second call has to shorten the file.
        os.pwrite(fd, content.ljust(file.st_size), 0)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    return True
