"""What a driver of a database says when a statement fails."""

from __future__ import annotations

import sqlite3

import sqlalchemy as sa

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
