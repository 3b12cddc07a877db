"""What a driver of a database says when a statement fails, and whether its disk is full."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import sqlalchemy as sa

from jupyter_gpushare.errors import StoreError

# SQLSTATE of PostgreSQL's disk_full (manual, appendix A).
_POSTGRESQL_DISK_FULL = "53100"


def is_disk_full(error: sa.exc.SQLAlchemyError) -> bool:
    """Return whether a commit failed for want of space.

    SQLite reports a write that ENOSPC cut short as SQLITE_FULL, before any sync (os_unix.c, unixWrite).
    """
    cause = getattr(error, "orig", None)
    is_sqlite = getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return is_sqlite or getattr(cause, "sqlstate", None) == _POSTGRESQL_DISK_FULL


def brief(error: Exception) -> str:
    """Return what went wrong in one line: the further ones of a driver may quote a row, with its secrets."""
    cause = getattr(error, "orig", None) or error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def free_bytes(folder: Path) -> int:
    """Return the free space of a folder's disk for a process without privileges.

    Raises:
        StoreError: the disk does not answer.
    """
    try:
        space = os.statvfs(folder)
    except OSError as error:
        raise StoreError(f"the disk of the database does not answer: {error.strerror}") from None
    return space.f_bavail * space.f_frsize
