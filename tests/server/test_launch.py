"""Which command a dialog becomes, and what the dialog begins with: no server, only files."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.errors import InvalidRequest, NotFound
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.jobfiles import own_output
from jupyter_gpushare.server.launch import Spec, defaults, find, form, job_of, specs_of

KERNEL = ("-m", "ipykernel_launcher", "-f", "{connection_file}")

NOW = datetime(2031, 5, 6, 14, 2, 3)
SPECS = (
    Spec("ir", "R", "R", ("R",)),
    Spec("python3", "Python 3", "python", ("python", "-m", "ipykernel_launcher")),
    Spec("torch", "PyTorch", "python", ("/env/torch/bin/python", "-m", "ipykernel_launcher")),
)


def cell(source: Any, *tags: str) -> dict[str, Any]:
    return {"cell_type": "code", "source": source, "metadata": {"tags": list(tags)}, "outputs": []}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "vision").mkdir()
    metadata = {"kernelspec": {"name": "torch", "display_name": "PyTorch", "language": "python"}}
    text = ["# defaults\n", "lr = 1e-3\n", "epochs: int = 10\n", "a = b = 2\n", "name = 'x'"]
    cells = [cell("import torch"), cell(text, "parameters")]
    plain = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "vision" / "train.ipynb").write_text(json.dumps(plain))
    for name in ("vision/train.py", "run.sh", "data.csv", "vision/program"):
        (tmp_path / name).write_text("")
    (tmp_path / "vision" / "program").chmod(0o755)
    return tmp_path


def asked(root: Path, environ: dict[str, str] | None = None, **fields: Any) -> wire.JobRequest:
    return job_of(wire.LaunchRequest(**fields), root, SPECS, environ or {}, NOW)


def test_a_notebook_writes_another_one_beside_itself(root):
    parameters = {"lr": "0.1", "name": "a b"}
    job = asked(root, path="vision/train.ipynb", kernel="torch", parameters=parameters, gpus="2")
    source, output = root / "vision" / "train.ipynb", root / "vision" / "train-20310506-140203.ipynb"
    assert job.command == [
        *[
            sys.executable,
            "-X",
            "utf8",
            "-P",
            "-m",
            "jupyter_gpushare.job.notebook",
            str(source),
            str(output),
        ],
        *["--kernel", "torch", "-p", "lr", "0.1", "-p", "name", "a b"],
    ]
    assert (job.cwd, job.name, job.gpus) == (str(root / "vision"), "train.ipynb", "2")
    assert job.source == wire.JobSource(
        path="vision/train.ipynb",
        kernel="torch",
        output="vision/train-20310506-140203.ipynb",
        parameters=parameters,
    )


def test_the_longest_name_of_a_notebook_leaves_space_for_that_of_its_output(root):
    source = root / ("学" * 80 + ".ipynb")
    source.write_text((root / "vision" / "train.ipynb").read_text())
    written = Path(asked(root, path=source.name).command[7])
    assert written.name == "学" * 60 + "-20310506-140203.ipynb"
    own_output(written, "0123456789").write_text("{}")


@pytest.mark.parametrize(
    ("path", "kernel", "command"),
    [
        ("vision/train.py", "torch", ["/env/torch/bin/python", "{root}/vision/train.py", "--lr", "a b"]),
        ("vision/train.py", "python3", [sys.executable, "{root}/vision/train.py", "--lr", "a b"]),
        ("vision/train.py", "ir", [sys.executable, "{root}/vision/train.py", "--lr", "a b"]),
        ("/run.sh", "", ["bash", "{root}/run.sh", "--lr", "a b"]),
        ("vision/program", "", ["{root}/vision/program", "--lr", "a b"]),
    ],
)
def test_a_script_is_run_with_its_arguments(root, path, kernel, command):
    job = asked(root, path=path, kernel=kernel, arguments="--lr 'a b'")
    assert job.command == [word.format(root=root) for word in command]
    assert job.source is not None
    assert job.source.arguments == "--lr 'a b'"
    # The name of an environment stays only where the script runs in it.
    assert job.source.kernel == (kernel if kernel in ("torch", "python3") else "")


def script_in(root: Path, spec: Spec, environ: dict[str, str], *variables: str) -> wire.JobRequest:
    request = wire.LaunchRequest(path="vision/train.py", kernel=spec.name, variables=list(variables))
    return job_of(request, root, [spec], environ, NOW)


def python_in(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("")
    (folder / name).chmod(0o755)
    return folder / name


def test_an_environment_without_a_path_is_found_as_its_kernels_are(root):
    newest = python_in(root / "bin", "python4.7")
    path = {"PATH": f"/nowhere:{root}/bin"}
    job = script_in(root, Spec("new", "New", "python", ("python4.7", "-I", *KERNEL)), path)
    assert job.command[0] == str(newest)
    assert job.source is not None
    assert job.source.kernel == "new"
    # Its own variables say where its programs are.
    own = Spec("own", "Own", "python", ("python4.7", *KERNEL), {"PATH": f"{root}/own:$PATH"})
    ours = python_in(root / "own", "python4.7")
    assert script_in(root, own, path).command[0] == str(ours)
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        python_in(root / "bin", name)
        job = script_in(root, Spec("server", "Server", "python", (name, *KERNEL)), path)
        assert job.command[0] == sys.executable


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("python4.7", *KERNEL), "runs in 'python4.7', which this server does not find"),
        (("bash", "-c", "exec python -m ipykernel_launcher"), "does not say which Python"),
        (("conda", "run", "-n", "x", "python", *KERNEL), "does not say which Python"),
        ((), "does not say which Python"),
    ],
)
def test_a_script_does_not_run_elsewhere_than_in_its_environment(root, argv, says):
    with pytest.raises(InvalidRequest, match=says):
        script_in(root, Spec("new", "New", "python", argv), {"PATH": "/nowhere"})


def test_a_script_has_the_variables_of_its_environment_below_the_chosen_ones(root):
    env = {"SEED": "1", "MODE": "a", "LIBS": "$HOME/lib:${NONE}", "CUDA_VISIBLE_DEVICES": "0"}
    spec = Spec("torch", "PyTorch", "python", ("/env/torch/bin/python", *KERNEL), env)
    job = script_in(root, spec, {"HOME": "/home/a", "OTHER": "x"}, "SEED=2", "OTHER", "MODE")
    assert job.env == {
        "PYTHONUNBUFFERED": "1",
        "SEED": "2",
        "MODE": "a",
        "LIBS": "/home/a/lib:${NONE}",
        "OTHER": "x",
    }


def test_a_command_runs_at_the_root_or_where_it_is_told(root):
    job = asked(root, command="nvidia-smi -q", name="look")
    assert (job.command, job.cwd, job.name, job.source) == (["nvidia-smi", "-q"], str(root), "look", None)
    assert asked(root, command="ls", cwd="/tmp").cwd == "/tmp"


def test_fields_of_programs_are_passed_on(root):
    job = asked(root, command="ls", profile="1g.10gb", priority=-5, grace_s=90.0)
    assert (job.profile, job.priority, job.grace_s) == ("1g.10gb", -5, 90.0)


def test_variables_are_given_or_taken_from_the_server(root):
    job = asked(root, {"HF_HOME": "/data/hf", "SECRET": "x"}, command="a", variables=["HF_HOME", "SEED=1=2"])
    assert job.env == {"PYTHONUNBUFFERED": "1", "HF_HOME": "/data/hf", "SEED": "1=2"}
    with pytest.raises(InvalidRequest, match="no variable 'NOPE'"):
        asked(root, command="a", variables=["NOPE"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"path": "vision/none.py"}, "no file"),
        ({"path": "../secret.py"}, "no file"),
        ({"path": "vision"}, "no file"),
        ({"path": "vision/train.py", "kernel": "julia"}, "no environment 'julia'"),
        ({"path": "data.csv"}, "cannot be executed"),
        ({"path": "run.sh", "arguments": "'"}, "the arguments cannot be parsed"),
        ({"command": '"'}, "the command cannot be parsed"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(root, fields, says):
    with pytest.raises((InvalidRequest, NotFound), match=says):
        asked(root, **fields)


def test_the_dialog_begins_with_what_the_file_says(root):
    told = form(root, "vision/train.ipynb", SPECS)
    assert (told.kind, told.kernel, told.cwd) == ("notebook", "torch", str(root / "vision"))
    assert told.parameters == {"lr": "0.001", "epochs": "10", "name": "'x'"}
    assert [e.display_name for e in told.environments] == ["R", "Python 3", "PyTorch"]
    script = form(root, "vision/train.py", SPECS)
    assert (script.kind, script.kernel, script.parameters) == ("script", "python3", {})
    assert (form(root, "", SPECS).kind, form(root, "", SPECS).cwd) == ("command", str(root))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"cells": [{}]}',
        '{"metadata": []}',
        '{"metadata": {"kernelspec": null, "language_info": 1}, "cells": null}',
        '{"cells": ["text", null, {"metadata": null}, {"metadata": {"tags": null}}]}',
        '{"cells": [{"metadata": {"tags": ["parameters"]}, "source": null}]}',
        '{"cells": [{"metadata": {"tags": ["parameters"]}, "source": [1, null]}]}',
    ],
)
def test_a_broken_notebook_has_no_parameters(root, text):
    (root / "broken.ipynb").write_text(text)
    told = form(root, "broken.ipynb", SPECS)
    assert (told.kernel, told.parameters) == ("python3", {})
    assert asked(root, path="broken.ipynb").command[6] == str(root / "broken.ipynb")


def test_only_values_that_mean_the_same_anywhere_are_defaults():
    computed = "batch = 2**10\ndata = Path('x')\nthird = 1/3\nname = OTHER\nf = f'{name}'\nbad = {[]: 1}"
    assert defaults({"cells": [cell(computed, "parameters")]}) == {}
    plain = "a = -1\nb: float = 1e-3\nc = ['x', (1, None)]\nd = {'k': True}"
    told = {"a": "-1", "b": "0.001", "c": "['x', (1, None)]", "d": "{'k': True}"}
    assert defaults({"cells": [cell(plain, "parameters")]}) == told


def test_a_value_that_the_cell_computes_later_is_no_default():
    text = "a = 1\na = Path('x')\nb = 2\nb += 1\nc = load()\nc = 3"
    assert defaults({"cells": [cell(text, "parameters")]}) == {"c": "3"}


@pytest.mark.parametrize(
    "metadata", [{"kernelspec": {"language": "julia"}}, {"language_info": {"name": "R"}}]
)
def test_a_notebook_in_another_language_has_no_parameters(root, metadata):
    plain = {"cells": [cell("lr = 0.1", "parameters")], "metadata": metadata}
    (root / "other.ipynb").write_text(json.dumps(plain))
    assert form(root, "other.ipynb", SPECS).parameters == {}
    with pytest.raises(InvalidRequest, match="parameters are for Python notebooks, and this is one in"):
        asked(root, path="other.ipynb", parameters={"lr": "0.2"})


def test_values_that_the_notebook_has_anyway_are_not_set_again(root):
    parameters = {"lr": "0.001", "epochs": "20", "name": "'x'"}
    job = asked(root, path="vision/train.ipynb", parameters=parameters)
    assert job.command[8:] == ["-p", "epochs", "20"]
    assert job.source is not None
    assert job.source.parameters == parameters


def test_a_cell_that_is_no_python_has_no_defaults():
    assert defaults({"cells": [cell("%magic\nlr = 1", "parameters")]}) == {}


def test_a_link_to_a_file_elsewhere_is_a_file(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "a.py"
    other.write_text("")
    (root / "a.py").symlink_to(other)
    assert find(root, "a.py") == root / "a.py"


def test_the_environments_are_those_of_the_server():
    b = {"argv": ["x"], "language": "python", "env": {"N": 1}}
    found = {"b": {"spec": b}, "a": {"spec": {"display_name": "A", "env": None}}}
    assert specs_of(found) == (Spec("a", "A", "", ()), Spec("b", "b", "python", ("x",), {"N": "1"}))
