"""Paths of the compiled libraries: the preload library and the simulated driver.

The C sources are beside this file; `jupyter_gpushare.native.build` compiles them into ``lib/`` when the
package is installed.  This module only returns paths for a process's environment and loads nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from jupyter_gpushare.errors import GpuShareError

_HERE = Path(__file__).resolve().parent

PRELOAD_NAME = "libgpushare_preload.so"
SIMULATED_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")


def lib_dir() -> Path:
    """Return the folder of the compiled libraries.

    Raises:
        GpuShareError: they have not been built.
    """
    folder = _HERE / "lib"
    missing = [
        name
        for name in (PRELOAD_NAME, *(f"sim/{name}" for name in SIMULATED_NAMES))
        if not (folder / name).is_file()
    ]
    if missing:
        raise GpuShareError(
            f"not built: {', '.join(missing)} in {folder}; run: python -m jupyter_gpushare.native.build"
        )
    return folder


def preload_path() -> Path:
    """Return the path of the library for LD_PRELOAD that keeps a lease within its memory.

    Raises:
        GpuShareError: it is not built, or its path cannot be part of LD_PRELOAD,
            where spaces and colons separate entries.
    """
    return _loadable(lib_dir() / PRELOAD_NAME)


def install_preload(folder: Path) -> Path:
    """Copy the preload library into a folder and return its path there, which contains its hash.

    Earlier versions stay, because new processes in a running pod still use their path.

    Raises:
        GpuShareError: the library is not built, or the copy cannot be written.
    """
    content = preload_path().read_bytes()
    path = _loadable(folder / f"{hashlib.sha256(content).hexdigest()[:16]}-{PRELOAD_NAME}")
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != content:
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.chmod(0o755)
            new.rename(path)
    except OSError as error:
        raise GpuShareError(f"the preload library cannot be copied to {path}: {error.strerror}") from None
    return path


def sim_dir() -> Path:
    """Return the folder for LD_LIBRARY_PATH that has the simulated driver.

    Raises:
        GpuShareError: it is not built, or its path cannot be part of LD_LIBRARY_PATH.
    """
    return _loadable(lib_dir() / "sim")


def _loadable(path: Path) -> Path:
    if any(separator in str(path) for separator in " \t\n:;"):
        raise GpuShareError(f"the dynamic linker cannot take this path, install elsewhere: {path}")
    return path
