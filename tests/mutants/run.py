"""Run the mutants of mutants.toml; ``python -m tests.mutants.run WORD ...`` runs those that have all words.

Each mutant changes one line in a copy of this checkout.  There the tests of its entry run until the first
failure, for at most `LIMIT_S`.  It is *noticed* when a test fails that passes without it.  The exit status
is 1 if a line is gone, or if a test that fails with a mutant fails without it too.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import marked_processes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "jupyter_gpushare"
LISTED = Path(__file__).with_name("mutants.toml")
LIMIT_S = 60.0
# Ignored files that tests need: large, and never changed by a test.
_BUILT = (".venv", f"{PACKAGE}/ui/node_modules")
_OPTIONS = ("-x", "-q", "-ra", "-p", "no:cacheprovider", "-m", "not long and not browser")
_PARALLEL = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
# Other plugins take longer to load than many of the tests.
_PLUGINS = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "xdist.plugin")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed line, without its indentation, and the tests that have to notice."""

    file: str
    line: str
    becomes: str
    tests: str
    what: str = ""


def listed() -> list[Mutant]:
    """Return the mutants of mutants.toml."""
    return [Mutant(**entry) for entry in tomllib.loads(LISTED.read_text())["mutant"]]


def place(mutant: Mutant, root: Path = ROOT) -> tuple[Path, int]:
    """Return the file and the number of a mutant's line, also if the line has moved to another file.

    Raises:
        LookupError: no line or several lines have the text.
    """
    named = root / mutant.file
    for files in (lambda: [named], lambda: sorted((root / PACKAGE).rglob("*.py"))):
        found = [
            (file, number)
            for file in files()
            if file.is_file()
            for number, line in enumerate(file.read_text().splitlines(), 1)
            if line.strip() == mutant.line
        ]
        if len(found) == 1:
            return found[0]
    raise LookupError(f"{mutant.file}: not one line reads: {mutant.line}")


def copied(folder: Path) -> Path:
    """Copy this checkout, with its build results, into a folder."""
    ignored = shutil.ignore_patterns(
        ".git", "node_modules", ".venv", "_build", "__pycache__", "build", "dist"
    )
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    for name in _BUILT:
        if (ROOT / name).exists():
            (copy / name).symlink_to(ROOT / name)
    return copy


def pytest(copy: Path, *words: str, limit_s: float = LIMIT_S) -> tuple[int | None, str]:
    """Run tests in a copy; return the exit status (None after the limit) and the output."""
    mark = uuid.uuid4().hex
    environment = {
        **{
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GPUSHARE_"))
        },
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "GPUSHARE_MUTANT": mark,
    }
    command = [sys.executable, "-m", "pytest", *_PLUGINS, *_OPTIONS, *words]
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(command, cwd=copy, env=environment, stdout=log, stderr=log)
        try:
            status = running.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        while left := marked_processes(mark):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            running.poll()
            time.sleep(0.05)
        log.seek(0)
        return status, log.read()


def judged(mutant: Mutant, copy: Path) -> str:
    """Return "noticed by TEST", "survived", "not noticed in time", or "error: ..."."""
    try:
        file, number = place(mutant, copy)
    except LookupError as error:
        return f"error: {error}"
    source = file.read_text()
    lines = source.splitlines(keepends=True)
    old = lines[number - 1]
    lines[number - 1] = old.replace(mutant.line, mutant.becomes)
    try:
        file.write_text("".join(lines))
        status, said = pytest(copy, *_PARALLEL, *mutant.tests.split())
    finally:
        file.write_text(source)
    if status == 0:
        return "survived"
    if status is None:
        return "not noticed in time"
    test = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - |$)", said, re.MULTILINE)
    if test is None:
        return f"error: pytest ended with status {status}: {said[-500:]}"
    status, said = pytest(copy, test[1])
    return f"noticed by {test[1]}" if status == 0 else f"error: {test[1]} fails without it too: {said[-500:]}"


def main(words: list[str]) -> int:
    """Judge the mutants that have all words; print a line for each, and the share of noticed ones."""
    chosen = [mutant for mutant in listed() if all(word in str(mutant) for word in words)]
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="gpushare-mutants-") as folder:
        copy = copied(Path(folder))
        for number, mutant in enumerate(chosen, 1):
            began_at = time.monotonic()
            verdicts.append(judged(mutant, copy))
            where = f"{mutant.file}: {mutant.what or mutant.becomes}"
            print(
                f"{number:2}/{len(chosen)} {time.monotonic() - began_at:3.0f} s  {where}: {verdicts[-1]}",
                flush=True,
            )
    noticed = sum(verdict.startswith("noticed") for verdict in verdicts)
    print(f"{noticed} of {len(chosen)} mutants are noticed")
    return int(any(verdict.startswith("error") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
