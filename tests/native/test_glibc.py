"""The preload library loads in containers with an old glibc: a newer need would stop every program there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from jupyter_gpushare import native
from jupyter_gpushare.native import build
from tests.native.programs import run

NEWEST = (2, 17)

pytestmark = pytest.mark.skipif(
    shutil.which("objdump") is None, reason="needs objdump: apt-get install binutils"
)


def objdump(path: Path, *flags: str) -> str:
    return run("objdump", *flags, path, check=True).stdout


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
