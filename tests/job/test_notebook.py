"""A notebook run as a job: parameters, progress, the output notebook while it grows, failure, stop."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

from jupyter_gpushare.job import notebook as module
from jupyter_gpushare.job.notebook import Unusable, main, parameter_cell, place, with_parameters
from jupyter_gpushare.job.progress import SOCKET_VARIABLE
from jupyter_gpushare.protocol.jobfiles import last_lines
from tests.waiting import until


def notebook(*cells: str, language: str = "python") -> Any:
    made = nbformat.v4.new_notebook()
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": language}
    for text in cells:
        tags = ["parameters"] if text.startswith("# defaults") else []
        made.cells.append(nbformat.v4.new_code_cell(text, metadata={"tags": tags}))
    return made


def test_values_are_python_where_they_read_as_such_and_text_elsewhere() -> None:
    given = {"lr": "0.1", "layers": "[1, 2]", "name": "run 1", "quoted": "'a'", "on": "True", "मात्रा": "1"}
    told = parameter_cell(given)
    found: dict[str, Any] = {}
    exec(told, found)  # it is a cell
    del found["__builtins__"]
    assert found == {"lr": 0.1, "layers": [1, 2], "name": "run 1", "quoted": "a", "on": True, "मात्रा": 1}


@pytest.mark.parametrize("name", ["a b", "1a", "x²", "x; import os", ""])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(Unusable, match="not a name"):
        parameter_cell({name: "1"})


def test_parameters_go_behind_the_tagged_cell_else_to_the_top_and_replace_earlier_ones() -> None:
    tagged = with_parameters(notebook("import os", "# defaults\nlr = 1", "lr"), {"lr": "2"})
    assert [c.source.split("\n")[-1] for c in tagged.cells] == ["import os", "lr = 1", "lr = 2", "lr"]
    again = with_parameters(tagged, {"lr": "3"})
    assert [c.source.split("\n")[-1] for c in again.cells] == ["import os", "lr = 1", "lr = 3", "lr"]
    assert with_parameters(notebook("lr"), {"lr": "2"}).cells[0].source == "# Parameters\nlr = 2"
    with pytest.raises(Unusable, match="in julia"):
        with_parameters(notebook("1", language="julia"), {"lr": "2"})
    unnamed = nbformat.from_dict(
        {"metadata": {"kernelspec": None, "language_info": {"name": "R"}}, "cells": []}
    )
    with pytest.raises(Unusable, match=r"in r$"):
        with_parameters(unnamed, {"lr": "2"})


class Ran:
    """One run in a process of its own, with a socket for its progress."""

    def __init__(self, folder: Path, made: Any, *arguments: str, **env: str) -> None:
        self.folder = folder
        self.output = folder / "out.ipynb"
        self.progress: list[tuple[float, float]] = []
        nbformat.write(made, folder / "in.ipynb")
        self.runner = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.runner.bind(str(folder / "s"))
        self.runner.setblocking(False)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "jupyter_gpushare.job.notebook",
                "in.ipynb",
                "out.ipynb",
                *arguments,
            ],
            cwd=folder,
            env={**os.environ, SOCKET_VARIABLE: str(folder / "s"), "PYTHONPATH": os.getcwd(), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def texts(self) -> list[str]:
        """What the cells of the output notebook printed so far."""
        if not self.output.exists():
            return []
        cells = nbformat.read(self.output, as_version=4).cells
        return ["".join(o.get("text", "") for o in c.get("outputs", [])) for c in cells]

    def end(self) -> tuple[int, str]:
        log = self.process.communicate(timeout=60)[0]
        with self.runner, contextlib.suppress(BlockingIOError):
            while True:
                said = json.loads(self.runner.recv(1000))
                self.progress.append((said["done"], said["total"]))
        return self.process.returncode, log


def text_of(path: Path) -> str:
    return str(nbformat.read(path, as_version=4).cells[0].outputs[0].text)


def test_cells_run_with_parameters_and_the_output_grows(tmp_path: Path) -> None:
    made = notebook(
        "# defaults\nlr = 1",
        "print('rate', lr)",
        "import pathlib, time\nwhile not pathlib.Path('enough').exists(): time.sleep(0.05)\nprint('end')",
    )
    ran = Ran(tmp_path, made, "-p", "lr", "0.5")
    until(lambda: "rate 0.5\n" in ran.texts())
    assert ran.process.poll() is None
    (tmp_path / "enough").touch()
    code, log = ran.end()
    assert code == 0, log
    assert "rate 0.5" in log
    assert "[gpushare] cell 4 of 4" in log
    assert ran.texts() == ["", "", "rate 0.5\n", "end\n"]
    assert ran.progress == [(n, 4) for n in range(5)]
    assert nbformat.read(tmp_path / "in.ipynb", as_version=4).cells[1].outputs == []


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    content = {"name": name, "text": text}
    header = {"msg_type": "stream"}
    return {**header, "header": header, "content": content, "parent_header": {"msg_id": "1"}}


def test_of_what_a_cell_prints_the_notebook_keeps_the_beginning_and_the_log_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "CELL_TEXT_CHARS", 100)
    made = notebook("1")
    client, cell = module._Run(made, tmp_path / "out.ipynb"), made.cells[0]
    client.reset_execution_trackers()
    client.clear_before_next_output = False
    for n in range(50):
        client.process_message(stream(f"{n:09d}\n"), cell, 0)
        if n == 5:
            client.process_message(stream("w", "stderr"), cell, 0)
    assert capsys.readouterr().out == "".join(f"{n:09d}\n" + "w" * (n == 5) for n in range(50))
    texts = [(o.name, o.text) for o in cell.outputs]
    lines = [f"{n:09d}\n" for n in range(10)]
    assert texts == [
        ("stdout", "".join(lines[:6])),
        ("stderr", "w"),
        ("stdout", "".join(lines[6:])[:39] + "\n... see the log: it has all of it\n"),
    ]
    clear = {"msg_type": "clear_output", "content": {"wait": True}, "parent_header": {"msg_id": "1"}}
    client.process_message(clear, cell, 0)
    client.process_message(stream("anew"), cell, 0)
    assert [o.text for o in cell.outputs] == ["anew"]


def test_a_notebook_that_is_slow_to_save_is_saved_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved_at = [1000.0], []

    def slow(*_: object) -> None:
        saved_at.append(now[0])
        now[0] += 10.0

    monkeypatch.setattr(module, "write", slow)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = notebook("1")
    client = module._Run(made, tmp_path / "out.ipynb")
    client.reset_execution_trackers()
    client.clear_before_next_output = False
    for _ in range(1000):
        now[0] += 1.0
        client.process_message(stream("."), made.cells[0], 0)
    assert len(saved_at) > 2
    assert all(after - before > 200 for before, after in itertools.pairwise(saved_at))


def test_a_cell_that_fails_ends_the_run_and_is_in_the_output(tmp_path: Path) -> None:
    ran = Ran(tmp_path, notebook("1", "1 / 0", "2"))
    code, log = ran.end()
    assert code == 1
    assert "cell 2 failed" in log
    assert "ZeroDivisionError" in log
    cells = nbformat.read(ran.output, as_version=4).cells
    assert [c.execution_count for c in cells] == [1, 2, None]
    assert cells[1].outputs[0].ename == "ZeroDivisionError"
    assert ran.progress[-1] == (1, 3)


@pytest.mark.parametrize(
    ("cell", "quoted"),
    [
        (
            "import warnings\nwarnings.warn('of a library')\nraise SystemExit(3)",
            [
                "[gpushare] cell 1 failed",
                "An exception has occurred, use %tb to see the full traceback.",
                "SystemExit: 3",
            ],
        ),
        ("import os\nos._exit(3)", ["[gpushare] cell 1 of 1", "[gpushare] the kernel died"]),
    ],
)
def test_the_last_lines_are_the_error_and_no_warning_of_a_library(
    tmp_path: Path, cell: str, quoted: list[str]
) -> None:
    code, log = Ran(tmp_path, notebook(cell)).end()
    assert code == 1
    assert last_lines(log.encode()) == quoted


@pytest.mark.parametrize(
    ("words", "quoted"),
    [
        (
            ["/none/python"],
            ["[gpushare] the environment 'x' does not start: /none/python: No such file or directory"],
        ),
        (
            [sys.executable, "-m", "no_kernel"],
            [
                f"{sys.executable}: No module named no_kernel",
                "[gpushare] the environment 'x' does not start: Kernel died before replying to kernel_info",
            ],
        ),
    ],
)
def test_an_environment_that_does_not_start_is_named_with_what_its_kernel_printed(
    tmp_path: Path, words: list[str], quoted: list[str]
) -> None:
    spec = tmp_path / "share/kernels/x/kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(
        json.dumps({"argv": [*words, "{connection_file}"], "display_name": "x", "language": "python"})
    )
    code, log = Ran(tmp_path, notebook("1"), "--kernel", "x", JUPYTER_PATH=str(tmp_path / "share")).end()
    assert code == 2
    assert last_lines(log.encode()) == quoted


def test_cells_that_may_fail_are_done_and_those_that_are_skipped_are_none(tmp_path: Path) -> None:
    made = notebook("1", "1 / 0", "2", "3")
    made.cells[1].metadata["tags"] = ["raises-exception"]
    made.cells[2].metadata["tags"] = ["skip-execution"]
    ran = Ran(tmp_path, made)
    code, log = ran.end()
    assert code == 0, log
    assert "[gpushare] cell 3 of 3" in log
    assert ran.progress == [(n, 3) for n in range(4)]


def test_a_value_may_look_like_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(module, "run", lambda *arguments: ran.append(arguments) or 0)
    values = {"lr": "-1e-3", "flag": "--fast", "a": "-p", "x": "-x", "none": "", "text": " -1"}
    words = [word for name, value in values.items() for word in ("-p", name, value)]
    monkeypatch.delenv("GPUSHARE_JOB_ID", raising=False)
    assert main(["in.ipynb", "out.ipynb", "--kernel", "k", *words]) == 0
    assert ran == [(Path("in.ipynb"), Path("out.ipynb"), "k", values, "")]


def test_a_retry_leaves_the_output_of_the_earlier_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(run: Any) -> None:
        (cell,) = run.nb.cells
        cell.outputs = [
            nbformat.v4.new_output("stream", text="{GPUSHARE_JOB_ID} {ATTEMPT}\n".format(**os.environ))
        ]

    monkeypatch.setattr(module._Run, "execute", execute)
    monkeypatch.chdir(tmp_path)
    nbformat.write(notebook("1"), tmp_path / "in.ipynb")
    texts = []
    for job, attempt in [("jaaa", "1"), ("jbbb", "1"), ("jaaa", "2"), ("jbbb", "2")]:
        monkeypatch.setenv("GPUSHARE_JOB_ID", job)
        monkeypatch.setenv("ATTEMPT", attempt)
        assert main(["in.ipynb", "out.ipynb"]) == 0
        texts.append({path.name: text_of(path) for path in sorted(tmp_path.glob("out*.ipynb"))})
    assert texts == [
        {"out.ipynb": "jaaa 1\n"},
        {"out-jbbb.ipynb": "jbbb 1\n", "out.ipynb": "jaaa 1\n"},
        {"out-jbbb.ipynb": "jbbb 1\n", "out.ipynb": "jaaa 2\n"},
        {"out-jbbb.ipynb": "jbbb 2\n", "out.ipynb": "jaaa 2\n"},
    ]


@pytest.mark.parametrize("there", ["", "{", "[]", '{"metadata": {"gpushare": []}}', '{"metadata": {}}'])
def test_a_file_that_no_job_wrote_is_not_replaced(tmp_path: Path, there: str) -> None:
    (tmp_path / "out.ipynb").write_text(there)
    assert place(tmp_path / "out.ipynb", "jaaa") == tmp_path / "out-jaaa.ipynb"
    assert (tmp_path / "out.ipynb").read_text() == there


def test_of_two_jobs_that_begin_together_only_one_gets_the_place(tmp_path: Path) -> None:
    places = {place(tmp_path / "out.ipynb", job) for job in ("jaaa", "jbbb")}
    assert places == {tmp_path / "out.ipynb", tmp_path / "out-jbbb.ipynb"}
    assert place(tmp_path / "none" / "out.ipynb", "jaaa") == tmp_path / "none" / "out.ipynb"


def test_sigterm_ends_the_kernel_and_keeps_what_was_done(tmp_path: Path) -> None:
    ran = Ran(tmp_path, notebook("print('kept')", "import time\ntime.sleep(60)"))
    until(lambda: "kept\n" in ran.texts())
    time.sleep(0.5)
    ran.process.send_signal(signal.SIGTERM)
    code, log = ran.end()
    assert code == 143, log
    assert "kept\n" in ran.texts()


def test_sigterm_while_the_kernel_starts_ends_at_once(tmp_path: Path) -> None:
    ran = Ran(tmp_path, notebook("import time\ntime.sleep(60)"))
    until(ran.output.exists)
    time.sleep(0.7)
    ran.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert ran.end()[0] in (143, -signal.SIGTERM)
    assert time.monotonic() - began < 30, "it waited for its cell"


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "no.ipynb"), str(tmp_path / "out.ipynb")]) == 2
    assert "no.ipynb cannot be read" in capsys.readouterr().err
    nbformat.write(notebook("1"), tmp_path / "in.ipynb")
    assert main([str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), "--kernel", "fortran"]) == 2
    assert "no environment 'fortran'" in capsys.readouterr().err
