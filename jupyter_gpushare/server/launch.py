"""Translate the launch dialog into a job: the command for a notebook, script or program.

    name.ipynb     PYTHON -m jupyter_gpushare.job.notebook name.ipynb name-DATE.ipynb --kernel K -p A B
    name.py        PYTHON name.py ARGUMENTS      (the Python of the chosen environment, with its variables)
    name.sh        bash name.sh ARGUMENTS
    other          ./name ARGUMENTS              (if it is executable)
    no file        the words of the command

The command runs in the folder of the file, with the Hub's environment for servers, and with other
variables of this server that the user chooses by name.  The Python and the variables of an environment
come from its kernelspec, resolved as jupyter_client does.  ``-P`` keeps files in the user's folder from
shadowing modules of the notebook runner; kernels and scripts still import from their own folder.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any

from jupyter_gpushare.errors import InvalidRequest, NotFound
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.jobfiles import own_output

MAX_NOTEBOOK_BYTES = 64 << 20
_DEFAULT_KERNEL = "python3"
# The maximum that the name of the output takes from the notebook's name: a file name has at most 255 bytes,
# and a suffix follows.
_STEM_BYTES = 180
_PYTHON = "python"
# The names that `KernelManager.format_kernel_cmd` of jupyter_client replaces by `sys.executable`.
_OWN_PYTHON = frozenset(("python", f"python{sys.version_info[0]}", "python{}.{}".format(*sys.version_info)))
# The broker sets these variables for each job, and refuses a job that sets them.
_RESERVED_PREFIXES = ("GPUSHARE_", "JUPYTERHUB_", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD")


@dataclass(frozen=True, slots=True)
class Spec:
    """A kernelspec of this server."""

    name: str
    display_name: str
    language: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # values may refer to other variables: "$HOME/lib"


def specs_of(found: Mapping[str, Mapping[str, Any]]) -> tuple[Spec, ...]:
    """Return the kernelspecs in a kernelspec manager's answer, sorted by name."""
    specs = []
    for name, entry in sorted(found.items()):
        spec = entry.get("spec", {})
        display = str(spec.get("display_name") or name)
        argv = tuple(map(str, spec.get("argv", ())))
        env = {str(variable): str(value) for variable, value in (spec.get("env") or {}).items()}
        specs.append(Spec(str(name), display, str(spec.get("language", "")), argv, env))
    return tuple(specs)


def find(root: Path, path: str) -> Path:
    """Return the file with this ``path`` on the page.

    Raises:
        NotFound: the file does not exist, or is not below ``root``.
    """
    relative = path.strip("/")
    inside = relative and ".." not in Path(relative).parts and "\0" not in relative
    if not inside or not _is_file(root / relative):
        raise NotFound("there is no file %1 on this server", repr(path[:200]))
    return root / relative


def _is_file(path: Path) -> bool:
    """Return whether a file exists; False if its name is too long or its folder cannot be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def form(root: Path, path: str, specs: Iterable[Spec]) -> wire.LaunchForm:
    """Return the defaults of the dialog; ``path`` may be empty.

    Raises:
        NotFound: the file does not exist.
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
    kernel = str(_object(_object(notebook.get("metadata")).get("kernelspec")).get("name") or "")
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


def _object(value: Any) -> Mapping[str, Any]:
    """Return a JSON object unchanged, and {} for anything else, because notebooks cannot be trusted."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def language_of(notebook: Mapping[str, Any]) -> str:
    """Return the language of the notebook's code; Python if the notebook does not name one."""
    metadata = _object(notebook.get("metadata"))
    kernelspec, info = _object(metadata.get("kernelspec")), _object(metadata.get("language_info"))
    return str(kernelspec.get("language") or info.get("name") or _PYTHON).lower()


def defaults(notebook: Mapping[str, Any]) -> dict[str, str]:
    """Return the literals that the cell tagged ``parameters`` of a Python notebook assigns.

    Expressions (``Path("x")``, ``2**10``) are left out: they would come back from the dialog as text.
    """
    if language_of(notebook) != _PYTHON:
        return {}
    for cell in map(_object, _list(notebook.get("cells"))):
        if "parameters" in _list(_object(cell.get("metadata")).get("tags")):
            source = cell.get("source", "")
            return _literals(source if isinstance(source, str) else "".join(map(str, _list(source))))
    return {}


def _literals(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return found
    for line in tree.body:
        if isinstance(line, ast.Assign) and len(line.targets) == 1:
            target: ast.expr = line.targets[0]
            value: ast.expr | None = line.value
        elif isinstance(line, ast.AnnAssign | ast.AugAssign):
            target, value = line.target, line.value
        else:
            continue
        if not isinstance(target, ast.Name) or value is None:
            continue
        found.pop(target.id, None)
        with contextlib.suppress(ValueError, TypeError, MemoryError, RecursionError):
            if not isinstance(line, ast.AugAssign):
                ast.literal_eval(value)
                found[target.id] = ast.unparse(value)
    return found


def job_of(
    request: wire.LaunchRequest,
    root: Path,
    specs: Iterable[Spec],
    environ: Mapping[str, str],
    now: datetime,
) -> wire.JobRequest:
    """Return the job that the dialog describes; ``now`` is used if the request has no time of submission.

    Raises:
        InvalidRequest: the command is missing or cannot be parsed, or nothing can run the file.
        NotFound: the file or the environment does not exist.
    """
    by_name = {spec.name: spec for spec in specs}
    if request.kernel and request.kernel not in by_name:
        raise NotFound("there is no environment %1 on this server", repr(request.kernel[:60]))
    spec = by_name.get(request.kernel)
    spec_env: dict[str, str] = {}
    output, kernel = "", request.kernel
    file = find(root, request.path) if request.path else None
    if file is None:
        command = _words(request.command, "the command")
    elif file.suffix == ".ipynb":
        written = _output_of(file, _moment(request.at) if request.at else now)
        output = str(written.relative_to(root))
        command = _notebook_command(file, written, request)
    elif file.suffix == ".py" and spec is not None and spec.language == _PYTHON:
        spec_env = _variables_of(spec, environ)
        command = [_python_of(spec, dict(environ) | spec_env), str(file)]
        command += _words(request.arguments, "the arguments")
    else:
        command, kernel = [*_script(file), *_words(request.arguments, "the arguments")], ""
    # A duplicated job also names the variables of its environment, without values.
    known = dict(environ) | spec_env
    env = {"PYTHONUNBUFFERED": "1"} | spec_env | dict(_variable(text, known) for text in request.variables)
    return wire.JobRequest(
        **request.terms,
        command=command,
        project=request.project,
        name=request.name or (file.name[:100] if file else None),
        cwd=request.cwd or str(file.parent if file else root),
        env=env,
        source=wire.JobSource(
            path=request.path.strip("/"),
            kernel=kernel,
            output=output,
            arguments=request.arguments,
            parameters=request.parameters,
        )
        if file
        else None,
    )


def with_output(job: wire.Job, root: Path) -> wire.Job:
    """Return the job with the path of the notebook that it really writes (see `jobfiles.own_output`)."""
    if job.source is None or not job.source.output.endswith(".ipynb"):
        return job
    own = own_output(Path(job.source.output), job.id)
    if not _is_file(root / own):
        return job
    return wire.replace(job, source=wire.replace(job.source, output=str(own)))


def _moment(at: str) -> datetime:
    try:
        return datetime.fromisoformat(at).astimezone()
    except (ValueError, OverflowError):
        raise InvalidRequest("%1 is not a time", repr(at[:40])) from None


def _output_of(file: Path, now: datetime) -> Path:
    stem = file.stem.encode()[:_STEM_BYTES].decode(errors="ignore")
    return file.with_name(f"{stem}-{now:%Y%m%d-%H%M%S}.ipynb")


def _notebook_command(file: Path, output: Path, request: wire.LaunchRequest) -> list[str]:
    # With `-X utf8` the program reads its arguments and file names as UTF-8 in any locale.
    python = [sys.executable, "-X", "utf8", "-P"]
    command = [*python, "-m", "jupyter_gpushare.job.notebook", str(file), str(output)]
    if request.kernel:
        command += ["--kernel", request.kernel]
    notebook = _notebook(file)
    unchanged = defaults(notebook)
    changed = {name: value for name, value in request.parameters.items() if unchanged.get(name) != value}
    if changed and (language := language_of(notebook)) != _PYTHON:
        raise InvalidRequest("parameters are for Python notebooks, and this is one in %1", language)
    for name, value in changed.items():
        command += ["-p", name, value]
    return command


def _python_of(spec: Spec, environ: Mapping[str, str]) -> str:
    """Return the Python that runs the kernels of an environment.

    Raises:
        InvalidRequest: the Python is not on this server, or another program starts it.
    """
    name = f"the environment {spec.display_name[:60]!r}"
    program, *options = spec.argv or ("",)
    # `bash -c "..."` and `conda run python -m ...` start a Python but are not one.
    if "-m" not in options or not options[0].startswith("-"):
        raise InvalidRequest("%1 does not say which Python it runs in: submit a command", name)
    if program in _OWN_PYTHON:
        return sys.executable
    if os.path.isabs(program):
        return program
    if (found := shutil.which(program, path=environ.get("PATH"))) is None:
        raise InvalidRequest("%1 runs in %2, which this server does not find", name, repr(program[:200]))
    return os.path.abspath(found)


def _variables_of(spec: Spec, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: Template(value).safe_substitute(environ)
        for name, value in spec.env.items()
        if not name.startswith(_RESERVED_PREFIXES)
    }


def _script(file: Path) -> list[str]:
    if file.suffix == ".py":
        return [sys.executable, str(file)]
    if file.suffix == ".sh":
        return ["bash", str(file)]
    if os.access(file, os.X_OK):
        return [str(file)]
    raise InvalidRequest("%1 cannot be executed: only notebooks, .py, .sh and programs can be run", file.name)


def _words(text: str, name: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidRequest("%1 cannot be parsed: %2", name, error) from None


def _variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    name = name.strip()
    if equals:
        return name, value
    if name not in environ:
        raise InvalidRequest(
            "this server has no variable %1: give it as %2=VALUE", repr(name[:60]), name[:60]
        )
    return name, environ[name]
