"""Hatchling's build hook: adds the built files to wheel and sdist, or stops the build.

A wheel gets the C libraries, compiled for the architecture that the compiler targets, the kubelet's
messages and the JupyterLab extension.  An sdist gets the extension, so that a wheel is built from it
without Node.  The libraries depend on the architecture but not on the Python version, so the tag is
``py3-none-<platform>``.  An editable installation gets all but the extension, which `make setup` builds
afterwards.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# manylinux2014 (PEP 599): the oldest C library with a tag that is still in use.
_OLDEST_GLIBC = (2, 17)
_VERSION = re.compile(r"\bGLIBC_(\d+)\.(\d+)")
_LIB = "jupyter_gpushare/native/lib"
_MESSAGES = "jupyter_gpushare/kube/node/pod_resources"


class NativeBuildHook(BuildHookInterface[Any]):
    """The hook that hatchling calls before it collects the files of a wheel or an sdist."""

    def dependencies(self) -> list[str]:
        """Return the packages that this build needs besides hatchling; none if the extension is current."""
        return list(self._module("ui").requirements())

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build missing or outdated files, and tag the wheel.

        Raises:
            GpuShareError: the C compiler is missing or failed.
            OSError: protoc failed; it has printed why.
            BuildFailed: the extension could not be built.
        """
        if version != "editable":
            self._module("ui").build()
        if self.target_name != "wheel":
            return
        native = self._module("native")
        folder = self._library_folder(native, version)
        native.build(folder)
        files = {folder / library.output: f"{_LIB}/{library.output}" for library in native.LIBRARIES}
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{platform_tag(native.machine(), list(files))}"
        files[self._compile_messages()] = f"{_MESSAGES}.binpb"
        if version != "editable":
            build_data["force_include"].update({str(source): target for source, target in files.items()})

    def _library_folder(self, native: ModuleType, version: str) -> Path:
        """Return the folder of the libraries: that of the package, or another for another architecture."""
        machine = native.machine()
        if version == "editable" or machine == native.own_machine():
            return Path(self.root, _LIB)
        return Path(self.root, "build", f"native-{machine}")

    def _compile_messages(self) -> Path:
        made = Path(self.root, f"{_MESSAGES}.binpb")
        command = [
            "protoc",
            f"-I{self.root}",
            f"--descriptor_set_out={made}",
            f"{self.root}/{_MESSAGES}.proto",
        ]
        if protoc.main(command):
            raise OSError(f"protoc cannot compile {_MESSAGES}.proto")
        return made

    def _module(self, part: str) -> ModuleType:
        sys.path.insert(0, self.root)
        try:
            return import_module(f"jupyter_gpushare.{part}.build")
        finally:
            sys.path.remove(self.root)


def platform_tag(machine: str, libraries: list[Path]) -> str:
    """Return the libraries' platform tag: ``manylinux2014_x86_64.manylinux_2_17_x86_64``.

    The version is that of the newest glibc symbol that a library needs, at least 2.17.  Libraries without
    a glibc symbol (for another C library) get ``linux_<machine>``.

    Raises:
        GpuShareError: readelf is missing or cannot read a library.
    """
    needed = {version for library in libraries for version in glibc_versions(library)}
    if not needed:
        return f"linux_{machine}"
    newest = max(needed | {_OLDEST_GLIBC})
    tag = f"manylinux_{newest[0]}_{newest[1]}_{machine}"
    return f"manylinux2014_{machine}.{tag}" if newest == _OLDEST_GLIBC else tag


def glibc_versions(library: Path) -> set[tuple[int, int]]:
    """Return the versions of glibc that define the symbols a library needs.

    Raises:
        GpuShareError: readelf is missing or cannot read the library.
    """
    from jupyter_gpushare.errors import GpuShareError

    command = ["readelf", "--version-info", "--wide", str(library)]
    try:
        output = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise GpuShareError(f"readelf (package binutils) cannot read {library}: {error}") from error
    return {(int(major), int(minor)) for major, minor in _VERSION.findall(output)}
