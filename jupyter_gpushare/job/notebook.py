"""Runs a notebook as a training job: ``python -m jupyter_gpushare.job.notebook IN OUT [options]``.

* Parameters (``-p NAME VALUE``) go into a new cell after the first cell tagged ``parameters``
  (else at the top), as with papermill.
* The output notebook is replaced atomically after every cell, so that it can be opened at any
  time.  The text that cells print also goes to the log.
* The output belongs to its job (``metadata.gpushare.job``).  A new attempt replaces it; another
  job (a retry, or one submitted in the same second) writes `own_output` beside it.
* The progress of the job is the number of finished cells of all cells.

Exit codes: 0, 1 (a cell failed), 2 (wrong usage, no such notebook, an environment that is
missing or does not start) or 143 (SIGTERM: the output notebook has the finished cells).
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import atexit
import io
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from jupyter_gpushare.job.progress import progress
from jupyter_gpushare.protocol.jobfiles import own_output

STARTUP_S = 300
# The interval of saves while a cell runs; the end of a cell saves at once.
SAVE_EVERY_S = 5.0
# The interval is at least this many times the duration of the last save, so that big notebooks are saved
# less often.
SAVE_SPACING = 20
# The maximum of one cell's printed text in the notebook; the log has all of it.
CELL_TEXT_CHARS = 1 << 20
STOPPED = 128 + signal.SIGTERM


class Unusable(Exception):
    """The notebook cannot be run as requested; the text is for the user."""


def parameter_cell(parameters: Mapping[str, str]) -> str:
    """Return Python code that assigns the parameters: literals as such, everything else as text.

    Raises:
        Unusable: a name is not a Python identifier.
    """
    lines = ["# Parameters"]
    for name, text in parameters.items():
        if not name.isidentifier():
            raise Unusable(f"{name[:60]!r} is not a name of a parameter")
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = text
        lines.append(f"{name} = {value!r}")
    return "\n".join(lines)


def with_parameters(notebook: Any, parameters: Mapping[str, str]) -> Any:
    """Insert the parameters after the cell tagged ``parameters``, or at the top; replace earlier ones.

    Raises:
        Unusable: the notebook is not in Python, or a name is not a Python identifier.
    """
    if not parameters:
        return notebook
    kernelspec, info = (notebook.metadata.get(key) or {} for key in ("kernelspec", "language_info"))
    language = (kernelspec.get("language") or info.get("name") or "python").lower()
    if language != "python":
        raise Unusable(f"parameters are for Python notebooks, and this is one in {language}")
    cell = nbformat.v4.new_code_cell(parameter_cell(parameters), metadata={"tags": ["injected-parameters"]})
    cells = [c for c in notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    tagged = [n for n, c in enumerate(cells) if "parameters" in c.metadata.get("tags", [])]
    at = tagged[0] + 1 if tagged else 0
    notebook.cells = [*cells[:at], cell, *cells[at:]]
    return notebook


def write(notebook: Any, path: Path) -> None:
    """Write a notebook; replace the file atomically, so that readers see a complete one."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        nbformat.write(notebook, file)
    fresh.replace(path)


def place(output: Path, job: str) -> Path:
    """Reserve and return the output file of ``job``: ``output``, or `own_output` if that is another job's."""
    try:
        os.close(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        if _writer(output) != job:
            return own_output(output, job)
    except OSError:
        pass  # the first save reports why
    return output


def _writer(path: Path) -> str:
    """Return the job that wrote a notebook; "" if no job did, or the notebook cannot be read."""
    try:
        return str(json.loads(path.read_bytes())["metadata"]["gpushare"]["job"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return ""


class _Run(NotebookClient):
    """Runs a notebook, copies printed text to the log, reports progress and saves the output notebook."""

    def __init__(self, notebook: Any, output: Path, **options: Any) -> None:
        super().__init__(
            notebook,
            on_cell_execute=self._on_cell,
            on_cell_executed=self._on_cell_done,
            on_cell_error=self._on_cell_error,
            **options,
        )
        self._output = output
        self._saved_at = 0.0
        self._saving_s = 0.0
        self.total = sum(map(self._is_run, notebook.cells))
        self.done = 0
        self.error = ""  # the traceback of the last cell that failed

    def _is_run(self, cell: Any) -> bool:
        skipped = self.skip_cells_with_tag in cell.metadata.get("tags", [])
        return cell.cell_type == "code" and bool(cell.source.strip()) and not skipped

    def save(self) -> None:
        """Write the output notebook; a failed write does not end the run."""
        began_at = time.monotonic()
        try:
            write(self.nb, self._output)
        except OSError as error:
            text = f"{self._output} cannot be written: {error.strerror}"
            print(f"[gpushare] {text}", file=sys.stderr, flush=True)
        self._saved_at = time.monotonic()
        self._saving_s = self._saved_at - began_at

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "stream":
            print(msg["content"]["text"], end="", flush=True)
        result = super().process_message(msg, cell, cell_index)
        if time.monotonic() - self._saved_at > max(SAVE_EVERY_S, SAVE_SPACING * self._saving_s):
            self.save()
        return result

    def output(self, outs: list[Any], msg: dict[str, Any], display_id: str | None, cell_index: int) -> Any:
        """Add an output of a cell to ``outs``; join printed text, up to `CELL_TEXT_CHARS`."""
        if msg["msg_type"] != "stream":
            return super().output(outs, msg, display_id, cell_index)
        texts = [] if self.clear_before_next_output else [o.text for o in outs if o.output_type == "stream"]
        remaining_chars = CELL_TEXT_CHARS - sum(map(len, texts))
        if remaining_chars <= 0:
            return None
        text = msg["content"]["text"]
        if len(text) >= remaining_chars:
            text = f"{text[:remaining_chars]}\n... see the log: it has all of it\n"
        added = super().output(
            outs, {**msg, "content": {**msg["content"], "text": text}}, display_id, cell_index
        )
        before = outs[-2] if len(outs) > 1 else None
        if added is not None and before is not None and before.get("name") == added.name:
            before.text += outs.pop().text
            added = before
        return added

    async def async_start_new_kernel(self, **options: Any) -> None:
        # This replaces nbclient's own handler, which waits for the kernel.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_sigterm)
        try:
            await super().async_start_new_kernel(**options)
        except OSError as error:
            raise self._no_kernel(f"{error.filename}: {error.strerror}") from None

    async def async_start_new_kernel_client(self) -> Any:
        try:
            return await super().async_start_new_kernel_client()
        except RuntimeError as error:
            atexit.unregister(self._cleanup_kernel)  # it has run already, and would fail a second time
            raise self._no_kernel(str(error)) from None

    def _no_kernel(self, why: str) -> Unusable:
        return Unusable(f"the environment {self.kernel_name!r} does not start: {why}")

    def _on_cell(self, cell: Any, cell_index: int) -> None:
        print(f"[gpushare] cell {self.done + 1} of {self.total}", flush=True)

    def _on_cell_done(self, cell: Any, cell_index: int, execute_reply: dict[str, Any]) -> None:
        may_fail = "raises-exception" in cell.metadata.get("tags", [])
        if may_fail or execute_reply["content"]["status"] == "ok":
            self.done += 1
            progress(self.done, self.total)
        self.save()

    def _on_cell_error(self, cell: Any, cell_index: int, execute_reply: dict[str, Any]) -> None:
        """Keep the traceback; the text that the cell printed is in the log already."""
        reply = execute_reply["content"]
        self.error = "\n".join(reply.get("traceback") or [f"{reply.get('ename')}: {reply.get('evalue')}"])

    def _on_sigterm(self) -> None:
        """Save the finished cells and exit at once; the kernel ends with its parent."""
        print("[gpushare] stopped", file=sys.stderr, flush=True)
        self.save()
        os._exit(STOPPED)


def run(source: Path, output: Path, kernel: str, parameters: Mapping[str, str], job: str) -> int:
    """Run a notebook into an output notebook; return the exit code.  ``job`` is "" outside a job.

    Raises:
        Unusable: the notebook cannot be read, or its environment is missing or does not start.
    """
    try:
        notebook = nbformat.read(source, as_version=4)
    except (OSError, ValueError) as error:
        raise Unusable(f"{source} cannot be read: {error}") from None
    notebook = with_parameters(notebook, parameters)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    if job:
        notebook.metadata["gpushare"] = {"job": job}
        output = place(output, job)
        print(f"[gpushare] the output notebook is {output}", flush=True)
    client = _Run(
        notebook,
        output,
        timeout=None,
        startup_timeout=STARTUP_S,
        kernel_name=kernel or (notebook.metadata.get("kernelspec") or {}).get("name") or "python3",
        resources={"metadata": {"path": os.getcwd()}},
    )
    client.save()
    progress(0, client.total)
    try:
        client.execute()
    except NoSuchKernel as error:
        raise Unusable(f"there is no environment {error.name!r} here") from None
    except CellExecutionError:
        print(f"[gpushare] cell {client.done + 1} failed\n{client.error}", file=sys.stderr, flush=True)
        return 1
    except DeadKernelError:
        print("[gpushare] the kernel died", file=sys.stderr, flush=True)
        return 1
    finally:
        client.save()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the notebook of the command line; return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")  # the log is UTF-8 in any locale
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpushare.job.notebook", description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--kernel", default="", help="name of the environment; default: the notebook's")
    parser.add_argument("-p", dest="parameters", nargs=2, action="append", metavar=("NAME", "VALUE"))
    words = list(sys.argv[1:] if arguments is None else arguments)
    parameters: dict[str, str] = {}
    while "-p" in words[:-2]:
        # argparse would take a value like -1e-3 for an option.
        at = words.index("-p")
        _, name, value = words[at : at + 3]
        parameters[name] = value
        del words[at : at + 3]
    options = parser.parse_args(words)
    job = os.environ.get("GPUSHARE_JOB_ID", "")
    try:
        return run(options.notebook, options.output, options.kernel, parameters, job)
    except Unusable as error:
        print(f"[gpushare] {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
