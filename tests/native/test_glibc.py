"""The preload library loads in containers with an old glibc: a newer need would stop every program there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jupyter_gpushare import native
from jupyter_gpushare.native import build
from tests.native.test_hooks import compile_shared

NEWEST = (2, 17)

pytestmark = pytest.mark.skipif(
    shutil.which("objdump") is None, reason="needs objdump: apt-get install binutils"
)


def objdump(path: Path, *flags: str) -> str:
    return subprocess.run(
        ["objdump", *flags, str(path)], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def needed_versions(path: Path) -> set[tuple[int, ...]]:
    """Of glibc, by every undefined symbol of a library."""
    found = re.findall(r"\*UND\*.*GLIBC_([0-9.]+)", objdump(path, "-T"))
    return {tuple(int(part) for part in version.split(".")) for version in found}


@pytest.mark.parametrize("library", [library.output for library in build.LIBRARIES])
def test_no_symbol_is_newer_than_glibc_2_17(library: str) -> None:
    """The preload library loads in old containers; a wheel with the simulated driver is manylinux2014."""
    versions = needed_versions(native.preload_path().parent / library)
    assert versions
    assert max(versions) <= NEWEST


def test_the_libraries_of_before_glibc_2_34_are_named() -> None:
    needed = set(re.findall(r"NEEDED\s+(\S+)", objdump(native.preload_path(), "-p")))
    assert needed == {"libc.so.6", "libdl.so.2", "libpthread.so.0"}


@pytest.mark.parametrize("flags", [("-O3", "-D_FORTIFY_SOURCE=2"), ("-D_GNU_SOURCE", "-std=gnu2x")])
def test_flags_of_other_distributions_change_nothing(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Distributions add such flags, and some make the compiler name newer functions."""
    preload = next(library for library in build.LIBRARIES if "preload" in library.output)
    made = build.compile_library(preload, tmp_path, flags)
    assert max(needed_versions(made)) <= NEWEST


def test_a_library_that_needs_a_newer_glibc_would_stop_every_program(tmp_path: Path) -> None:
    """Why the versions are bound: the same program runs with the library, and not with a newer one."""
    newer = compile_shared("int gpushare_newer(void) { return 0; }\n", tmp_path / "libnewer.so")
    script = tmp_path / "versions"
    script.write_text("GLIBC_9.99 { global: *; };\n")
    wanting = tmp_path / "libwanting.so"
    libc = compile_shared(
        "int later(void) { return 0; }\n",
        tmp_path / "libc.so.6",
        f"-Wl,--version-script={script}",
        "-Wl,-soname,libc.so.6",
    )
    (tmp_path / "wanting.c").write_text("int later(void); int now(void); int now(void) { return later(); }\n")
    subprocess.run(
        [*build.compiler(), "-fPIC", "-shared", str(tmp_path / "wanting.c"), str(libc), "-o", str(wanting)],
        check=True,
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}

    def run(preload: Path) -> int:
        return subprocess.run(
            ["/bin/true"],
            env=environment | {"LD_PRELOAD": str(preload)},
            capture_output=True,
            check=False,
            timeout=60,
        ).returncode

    assert run(newer) == run(tmp_path / "missing.so") == 0
    assert run(wanting) != 0
    assert run(native.preload_path()) == 0
