"""From the page's dialog to a job: which command a notebook or a script becomes.

    name.ipynb     python -m jupyter_gpushare.job.notebook name.ipynb name-DATE.ipynb --kernel K -p A B
    name.py        PYTHON name.py ARGUMENTS      (the Python of the chosen environment)
    name.sh        bash name.sh ARGUMENTS
    other          ./name ARGUMENTS              (if it may be executed)
    no file        the words of the command

The command runs in the folder of the file.  A job is started by the Hub, with the
Hub's environment for servers: what else of this server's environment it needs is
chosen by name.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jupyter_gpushare import wire
from jupyter_gpushare.errors import InvalidRequest, NotFound

MAX_NOTEBOOK_BYTES = 64 << 20
_DEFAULT_KERNEL = "python3"


@dataclass(frozen=True, slots=True)
class Spec:
    """A kernelspec of this server."""

    name: str
    display_name: str
    language: str
    argv: tuple[str, ...]


def specs_of(found: Mapping[str, Mapping[str, Any]]) -> tuple[Spec, ...]:
    """Return the answer of a kernelspec manager, by name of the environment."""
    specs = []
    for name, entry in sorted(found.items()):
        spec = entry.get("spec", {})
        display = str(spec.get("display_name") or name)
        argv = tuple(map(str, spec.get("argv", ())))
        specs.append(Spec(str(name), display, str(spec.get("language", "")), argv))
    return tuple(specs)


def find(root: Path, path: str) -> Path:
    """Return the file that the page calls ``path``.

    Raises:
        NotFound: there is none, or not below ``root``.
    """
    relative = path.strip("/")
    inside = relative and ".." not in Path(relative).parts and "\0" not in relative
    if not inside or not (root / relative).is_file():
        raise NotFound(f"there is no file {path[:200]!r} on this server")
    return root / relative


def form(root: Path, path: str, specs: Iterable[Spec]) -> wire.LaunchForm:
    """Return what the dialog begins with; ``path`` may be empty.

    Raises:
        NotFound: there is no such file.
    """
    environments = [
        wire.Environment(name=s.name, display_name=s.display_name, language=s.language) for s in specs
    ]
    if not path:
        return wire.LaunchForm(
            path="", kind="command", cwd=str(root), kernel="", environments=environments, parameters={}
        )
    file = find(root, path)
    notebook = _notebook(file) if file.suffix == ".ipynb" else {}
    kernel = str(notebook.get("metadata", {}).get("kernelspec", {}).get("name", ""))
    known = {environment.name for environment in environments}
    default = _DEFAULT_KERNEL if _DEFAULT_KERNEL in known else ""
    return wire.LaunchForm(
        path=path.strip("/"),
        kind="notebook" if file.suffix == ".ipynb" else "script",
        cwd=str(file.parent),
        kernel=kernel if kernel in known else default,
        environments=environments,
        parameters=defaults(notebook),
    )


def _notebook(file: Path) -> dict[str, Any]:
    try:
        with file.open(encoding="utf-8") as opened:
            plain = json.loads(opened.read(MAX_NOTEBOOK_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def defaults(notebook: Mapping[str, Any]) -> dict[str, str]:
    """Return what the cell tagged ``parameters`` assigns, as it is written there."""
    for cell in notebook.get("cells", []):
        if "parameters" in cell.get("metadata", {}).get("tags", []):
            source = cell.get("source", "")
            text = source if isinstance(source, str) else "".join(source)
            return dict(_assignments(text))
    return {}


def _assignments(text: str) -> Iterable[tuple[str, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    for line in tree.body:
        if isinstance(line, ast.Assign) and len(line.targets) == 1:
            target: ast.expr = line.targets[0]
            value: ast.expr | None = line.value
        elif isinstance(line, ast.AnnAssign):
            target, value = line.target, line.value
        else:
            continue
        if isinstance(target, ast.Name) and value is not None:
            yield target.id, ast.unparse(value)


def job_of(
    asked: wire.LaunchRequest,
    root: Path,
    specs: Iterable[Spec],
    environ: Mapping[str, str],
    now: datetime,
) -> wire.JobRequest:
    """Return the job that a dialog describes.

    Raises:
        InvalidRequest: nothing to run, or a text that cannot be taken apart.
        NotFound: no such file or environment.
    """
    by_name = {spec.name: spec for spec in specs}
    if asked.kernel and asked.kernel not in by_name:
        raise NotFound(f"there is no environment {asked.kernel[:60]!r} on this server")
    env = {"PYTHONUNBUFFERED": "1"} | dict(_variable(text, environ) for text in asked.variables)
    output = ""
    if not asked.path:
        command, folder, name = _words(asked.command, "the command"), root, None
    else:
        file = find(root, asked.path)
        folder, name = file.parent, file.name
        if file.suffix == ".ipynb":
            written = file.with_name(f"{file.stem}-{now:%Y%m%d-%H%M%S}.ipynb")
            output = str(written.relative_to(root))
            command = _notebook_command(file, written, asked)
        else:
            command = [*_script(file, by_name.get(asked.kernel)), *_words(asked.arguments, "the arguments")]
    cwd = asked.cwd or str(folder)
    return wire.JobRequest(
        command=command,
        gpus=asked.gpus,
        memory=asked.memory,
        profile=asked.profile,
        project=asked.project,
        name=asked.name or (name[:100] if name else None),
        checkpoint=asked.checkpoint,
        borrow=asked.borrow,
        cwd=cwd,
        env=env,
        priority=asked.priority,
        retries=asked.retries,
        source=wire.JobSource(
            path=asked.path.strip("/"),
            kernel=asked.kernel,
            output=output,
            arguments=asked.arguments,
            parameters=asked.parameters,
        )
        if asked.path
        else None,
        notify=asked.notify,
    )


def _notebook_command(file: Path, output: Path, asked: wire.LaunchRequest) -> list[str]:
    command = [sys.executable, "-m", "jupyter_gpushare.job.notebook", str(file), str(output)]
    if asked.kernel:
        command += ["--kernel", asked.kernel]
    for name, value in asked.parameters.items():
        command += ["-p", name, value]
    return command


def _script(file: Path, spec: Spec | None) -> list[str]:
    if file.suffix == ".py":
        own = spec is not None and spec.language == "python" and spec.argv and os.path.isabs(spec.argv[0])
        return [spec.argv[0] if spec is not None and own else sys.executable, str(file)]
    if file.suffix == ".sh":
        return ["bash", str(file)]
    if os.access(file, os.X_OK):
        return [str(file)]
    raise InvalidRequest(f"{file.name} cannot be executed: only notebooks, .py, .sh and programs can be run")


def _words(text: str, what: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidRequest(f"{what} cannot be taken apart: {error}") from None


def _variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    name = name.strip()
    if equals:
        return name, value
    if name not in environ:
        raise InvalidRequest(f"this server has no variable {name[:60]!r}: give it as {name[:60]}=VALUE")
    return name, environ[name]
