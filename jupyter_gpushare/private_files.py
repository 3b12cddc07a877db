"""Files with a secret, which are read only if no other user can read or replace them.

Kubernetes gives a Secret to a process that is not root as links to root's files, which a group of the
process (``fsGroup``) may read.  This is accepted too.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from jupyter_gpushare.errors import GpuShareError


def read_private(path: Path, max_bytes: int) -> bytes:
    """Return up to ``max_bytes`` of a file that no other user can read.

    Raises:
        GpuShareError: others can read or replace the file, or it cannot be read; the text says what to
            change.
    """
    try:
        link = os.lstat(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            content = os.read(descriptor, max_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise GpuShareError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise GpuShareError(f"{path} cannot be read: it is not a regular file")
    trusted = (0, os.geteuid())
    if link.st_uid not in trusted:  # `path` may be a symbolic link
        raise GpuShareError(f"{path} cannot be read: another user (uid {link.st_uid}) made this link")
    is_of_group = found.st_uid == 0 and found.st_gid in (os.getegid(), *os.getgroups())
    if found.st_mode & (0o037 if is_of_group and os.geteuid() != 0 else 0o077):
        mode = stat.S_IMODE(found.st_mode)
        raise GpuShareError(f"{path} can be read by others (mode {mode:o}): chmod 600 {path}")
    if found.st_uid not in trusted:
        raise GpuShareError(f"{path} belongs to another user (uid {found.st_uid}), neither root nor this one")
    return content
