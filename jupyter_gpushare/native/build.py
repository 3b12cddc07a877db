"""Compile the C libraries: ``python -m jupyter_gpushare.native.build``.

The build needs only a C compiler and Python's standard library: no CUDA headers, no driver.  A library is
compiled if one of its sources (or this file) is newer.  It first has another name, so that no process loads
half a file.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jupyter_gpushare.errors import GpuShareError

NATIVE = Path(__file__).resolve().parent

# There is no -Werror, because a newer compiler may have new warnings.  The tests add it.
STRICT = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Wconversion")
SHARED = ("-fvisibility=hidden", "-fPIC", "-shared", "-pthread", "-Wl,-z,defs")
# The libraries that had some functions before glibc 2.34 (old_glibc.h).
OLD_GLIBC = ("-Wl,--no-as-needed", "-l:libdl.so.2", "-l:libpthread.so.0")


@dataclass(frozen=True, slots=True)
class Library:
    """One shared object: its path below ``lib/``, its sources and its linker flags."""

    output: str
    sources: tuple[str, ...]
    linker: tuple[str, ...] = ()


def _sources(*patterns: str) -> tuple[str, ...]:
    return tuple(sorted(str(path.relative_to(NATIVE)) for each in patterns for path in NATIVE.glob(each)))


# Both simulated libraries share the devices, their time, their processes and the cgroups.
_SHARED_BY_BOTH = _sources(*(f"simulator/sim_{part}.c" for part in ("gpu", "time", "moves", "spec", "group")))
_NVML = _sources("simulator/sim_nvml*.c")

LIBRARIES = (
    Library(
        "sim/libcuda.so.1",
        tuple(source for source in _sources("simulator/*.c") if source not in _NVML),
        # -Bsymbolic: its calls of its own functions stay inside, even if a preloaded library has the names.
        ("-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", *OLD_GLIBC),
    ),
    Library(
        "sim/libnvidia-ml.so.1",
        (*_SHARED_BY_BOTH, *_NVML),
        ("-Wl,-soname,libnvidia-ml.so.1", "-Wl,-Bsymbolic", *OLD_GLIBC),
    ),
    Library(
        "libgpushare_preload.so",
        _sources("preload/*.c", "preload/*.S"),
        ("-Wl,-Bsymbolic", *OLD_GLIBC),
    ),
)


def compiler() -> tuple[str, ...]:
    """Return the C compiler's command line, from ``CC`` or plain ``cc``."""
    return tuple(shlex.split(os.environ.get("CC", ""))) or ("cc",)


def own_machine() -> str:
    """Return the architecture of this machine as in the tags of wheels: ``x86_64``."""
    return os.uname().machine


def machine() -> str:
    """Return the architecture that the C compiler targets; this machine's if the compiler does not say."""
    try:
        command = [*compiler(), "-dumpmachine"]
        triplet = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return own_machine()
    return triplet.strip().partition("-")[0] or own_machine()


def is_current(library: Library, folder: Path) -> bool:
    """Return whether a library exists and is not older than any of its inputs."""
    output = folder / library.output
    if not output.is_file():
        return False
    inputs = [NATIVE / source for source in library.sources]
    inputs += [*NATIVE.rglob("*.h"), Path(__file__)]
    built_at = output.stat().st_mtime_ns
    return all(path.stat().st_mtime_ns <= built_at for path in inputs)


def compile_library(library: Library, folder: Path, extra_flags: Sequence[str] = ()) -> Path:
    """Compile a library and return its path below ``folder``.

    Raises:
        GpuShareError: there is no compiler, or it failed; the text has its output.
    """
    output = folder / library.output
    output.parent.mkdir(parents=True, exist_ok=True)
    sources = [str(NATIVE / source) for source in library.sources]
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".building-") as scratch:
        made = Path(scratch) / output.name
        flags = [*STRICT, *extra_flags, *SHARED, f"-I{NATIVE}"]
        command = [*compiler(), *flags, *sources, "-o", str(made), "-ldl", *library.linker]
        try:
            result = subprocess.run(
                command, capture_output=True, encoding="utf-8", errors="replace", check=False
            )
        except OSError as error:
            raise GpuShareError(
                f"no C compiler: {command[0]!r} cannot be run ({error.strerror}). "
                "Install one (Debian, Ubuntu: apt-get install gcc libc6-dev) or name it in CC."
            ) from error
        if result.returncode != 0:
            raise GpuShareError(f"{shlex.join(command)} failed:\n{result.stderr}")
        made.chmod(0o755)
        made.replace(output)
    return output


def build(folder: Path | None = None) -> tuple[Path, ...]:
    """Compile the libraries that are not current, and return their paths.

    Raises:
        GpuShareError: a compilation failed (see `compile_library`), or this is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise GpuShareError(f"the libraries work with the Linux driver only, not on {sys.platform}")
    target = folder or NATIVE / "lib"
    return tuple(compile_library(library, target) for library in LIBRARIES if not is_current(library, target))


def main() -> int:
    """Run the command; return exit code 0 if the libraries are built, or print why not and return 1."""
    try:
        made = build()
    except GpuShareError as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
