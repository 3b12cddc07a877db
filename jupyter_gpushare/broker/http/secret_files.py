"""Files with a secret of the broker: its spawner token and its cookie secret."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from jupyter_gpushare.errors import StoreError


def secret_file(path: Path) -> str:
    """Return the secret in a file that only the broker's user can read; a missing file is created.

    Raises:
        StoreError: others can read it, or it cannot be made.
    """
    try:
        if not path.exists() or not path.stat().st_size:
            _write_secret(path)
        if path.stat().st_mode & 0o077:
            raise StoreError(f"{path} can be read by others: chmod 600 it")
        return path.read_text().strip()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None


def _write_secret(path: Path) -> None:
    """Create a secret atomically; an empty file, left by a full disk, is replaced."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(name, path)
        except FileExistsError:
            if not path.stat().st_size:
                os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
