"""The libraries are built by a bare compiler, once, and a missing compiler says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.native import build
from tests.native.programs import run

PRELOAD = next(library for library in build.LIBRARIES if "preload" in library.output)


def test_a_library_is_compiled_once_and_again_when_a_source_is_newer(tmp_path: Path) -> None:
    assert not build.is_current(PRELOAD, tmp_path)
    made = build.compile_library(PRELOAD, tmp_path, ["-Werror"])
    assert made == tmp_path / "libgpushare_preload.so"
    assert build.is_current(PRELOAD, tmp_path)
    source = build.NATIVE / PRELOAD.sources[0]
    older = source.stat().st_mtime - 10
    os.utime(made, (older, older))
    assert not build.is_current(PRELOAD, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["libgpushare_preload.so"]


def test_the_installed_libraries_are_current() -> None:
    assert build.build() == ()


def test_a_missing_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(GpuShareError, match=r"no C compiler: 'no-such-compiler'.*apt-get install gcc"):
        build.compile_library(PRELOAD, tmp_path)


def test_a_compiler_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -fno-such-option")
    with pytest.raises(GpuShareError, match="no-such-option"):
        build.compile_library(PRELOAD, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_needs_the_standard_library_only(tmp_path: Path) -> None:
    """As on a bare machine: no site-packages at all."""
    root = str(build.NATIVE.parents[1])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from jupyter_gpushare.native import build; build.main()"
    )
    done = run(sys.executable, "-I", "-S", "-c", code, root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    env = {**os.environ, "CC": "no-such-compiler"}
    folder = str(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
        "from jupyter_gpushare.native import build;"
        "build.is_current = lambda *_: False; sys.exit(build.main())"
    )
    done = run(sys.executable, "-I", "-S", "-c", code, root, folder, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("gpushare: no C compiler")


def test_the_wheel_hook_adds_the_libraries_and_tags_the_platform_and_no_python(tmp_path: Path) -> None:
    hook = pytest.importorskip("jupyter_gpushare.native.hatch_build")
    built = hook.NativeBuildHook(str(build.NATIVE.parents[1]), {}, None, None, str(tmp_path), "wheel")
    data: dict[str, object] = {"force_include": {}}
    built.initialize("editable", data)
    assert data.pop("tag").startswith("py3-none-manylinux")  # type: ignore[attr-defined]
    assert data == {"pure_python": False, "infer_tag": False, "force_include": {}}


def test_the_tag_names_the_oldest_glibc_that_has_all_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = pytest.importorskip("jupyter_gpushare.native.hatch_build")
    needs = {"old": {(2, 2), (2, 14)}, "new": {(2, 2), (2, 34)}, "none": set()}
    monkeypatch.setattr(hook, "glibc_versions", lambda path: needs[path.name])
    assert hook.platform_tag("x86_64", [Path("old")]) == "manylinux2014_x86_64.manylinux_2_17_x86_64"
    assert hook.platform_tag("aarch64", [Path("old"), Path("new")]) == "manylinux_2_34_aarch64"
    assert hook.platform_tag("x86_64", [Path("none")]) == "linux_x86_64"


def test_the_compiler_says_for_which_machine_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.machine() == build.own_machine() == os.uname().machine
    monkeypatch.setenv("CC", "echo aarch64-linux-gnu")
    assert build.machine() == "aarch64"
