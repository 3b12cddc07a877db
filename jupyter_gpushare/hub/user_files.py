"""Files that the Hub hands to a system user: written by a process of that user.

The Hub is often root, and what is in a home belongs to its owner: a folder there may be a link to any
other.  So root writes, moves and chowns nothing in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
from pathlib import Path
from typing import Any

from jupyter_gpushare.errors import GpuShareError

WRITE_S = 10.0
# $1: the folder, $2: the file, $3: its bytes.  Renamed, so that a reader finds one whole version.
# A Hub that ends meanwhile closes the pipe, and this ends with what had come by then.
_WRITE = (
    'umask 077 && mkdir -p "$1" && new=$(mktemp "$1/.XXXXXX") && cat > "$new" && '
    '[ "$(wc -c < "$new")" -eq "$3" ] && mv -f "$new" "$1/$2" || { rm -f "$new"; false; }'
)
_SAID_BYTES = 500
_KILLED_S = 1.0


async def write_as(user: str, path: Path, content: bytes) -> None:
    """Write a file of ``user``, mode 0600, and the folders above it that are missing.

    Raises:
        GpuShareError: the user's process could not write it, or not within `WRITE_S`.
    """
    errors, stderr = os.pipe()  # what is not read stays in the kernel, which takes 64 KiB at most
    try:
        os.set_blocking(errors, False)
        try:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", _WRITE, "sh", str(path.parent), path.name, str(len(content))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                cwd="/",
                env={"PATH": "/usr/bin:/bin"},
                **_identity(user),
            )
        finally:
            os.close(stderr)
        await _feed(process, path, content)
        if process.returncode:
            said = b""
            with contextlib.suppress(BlockingIOError):  # nothing, and a process of its own is left
                said = os.read(errors, _SAID_BYTES)
            raise GpuShareError(f"{path} cannot be written: {said.decode(errors='replace').strip()}")
    finally:
        os.close(errors)


async def _feed(process: asyncio.subprocess.Process, path: Path, content: bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            await process.communicate(content)
    except TimeoutError:
        raise GpuShareError(f"{path} was not written within {WRITE_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # one that waits for a disk does not even die
                async with asyncio.timeout(_KILLED_S):
                    await process.wait()


def _identity(user: str) -> dict[str, Any]:
    """Return the arguments that make a process one of the user's; none where the Hub is that user."""
    entry = pwd.getpwnam(user)
    if os.geteuid() != 0 or entry.pw_uid == 0:
        return {}
    groups = os.getgrouplist(user, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
