"""Read traces: training jobs, notebook cells, pods and nodes; CSV, plain or gzip.

A file is read and checked completely before the simulation starts.  The error for
the first invalid row names the file, the row (1 is the header) and the expectation.

==========  ================================================================
training    ``num_gpu`` (whole GPUs), ``submit_time``, ``duration`` (seconds),
            sorted by ``submit_time``
cells       the same columns in *minutes*; rows are grouped by session: a drop
            of ``submit_time`` starts the next session
pods        ``cpu_milli, memory_mib, num_gpu, gpu_milli``, optional
            ``gpu_spec`` (suitable GPU models, ``V100M16|V100M32``)
nodes       ``cpu_milli, memory_mib, gpu, model``
pairs       ``job_a, job_b, rate_a, rate_b``: the part of its speed alone that
            each job keeps beside the other; 0: they do not fit together
==========  ================================================================

Other columns are ignored.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.core.replay import Cell
from jupyter_gpushare.errors import InvalidRequest

GZIP_MAGIC = b"\x1f\x8b"
MINUTE_S = 60.0
# The speeds of two jobs beside each other, as parts of their speeds alone.
PairRates = tuple[float, float]
# Larger numbers are mistakes: this is 30,000 years in seconds.
LARGEST = 1e12


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One job of a trace."""

    gpus: int
    submit_at: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class NotebookSession:
    """The cells of one session, in order; ``gpus`` is the largest request of a cell."""

    gpus: int
    cells: tuple[Cell, ...]


class TracePod(NamedTuple):
    """The request of one pod of a trace; pods with equal requests are interchangeable."""

    gpus: int
    gpu_milli: int  # of each GPU
    cpu_milli: int
    memory_mib: int
    models: frozenset[str]  # suitable GPU models; empty: any


class Stock(NamedTuple):
    """Free resources of a node; nodes with the same stock are interchangeable."""

    model: str
    cpu_milli: int
    memory_mib: int
    gpu_milli: tuple[int, ...]  # per GPU, ascending


def read_jobs(path: Path, *, max_gpus: int | None = None) -> list[TrainingJob]:
    """Return the training jobs of ``path``, sorted by submission.

    Raises:
        InvalidRequest: the file cannot be read, a row is invalid, or a job requests
            more than ``max_gpus`` GPUs.
    """
    jobs: list[TrainingJob] = []
    before = 0.0
    for row in _rows(path, ("num_gpu", "submit_time", "duration")):
        gpus = _gpus(row, max_gpus, "of the cluster")
        submit_at = row.number("submit_time")
        if submit_at < before:
            raise row.wrong("submit_time", f"at least {before:g}, the row before (rows are sorted by time)")
        before = submit_at
        jobs.append(TrainingJob(gpus, submit_at, row.number("duration")))
    return jobs


def read_cells(path: Path, *, max_gpus: int | None = None) -> list[NotebookSession]:
    """Return the notebook sessions of ``path``, with times in seconds instead of minutes.

    Raises:
        InvalidRequest: the file cannot be read, a row is invalid, or a cell requests
            more than ``max_gpus`` GPUs.
    """
    sessions: list[tuple[list[int], list[Cell]]] = []
    for row in _rows(path, ("num_gpu", "submit_time", "duration")):
        cell = Cell(row.number("submit_time") * MINUTE_S, row.number("duration") * MINUTE_S)
        if not sessions or cell.submit_at < sessions[-1][1][-1].submit_at:
            sessions.append(([], []))
        gpus, cells = sessions[-1]
        gpus.append(_gpus(row, max_gpus, "of the largest node: a session has one"))
        cells.append(cell)
    return [NotebookSession(max(gpus), tuple(cells)) for gpus, cells in sessions]


def read_pods(path: Path) -> list[TracePod]:
    """Return the pods of ``path`` in the order of the file.

    Raises:
        InvalidRequest: the file cannot be read, or a row is invalid.
    """
    pods = []
    for row in _rows(path, ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")):
        gpus = row.count("num_gpu")
        milli = row.count("gpu_milli", minimum=1 if gpus else 0, maximum=WHOLE_GPU) if gpus else 0
        if gpus > 1 and milli != WHOLE_GPU:
            raise row.wrong("gpu_milli", f"{WHOLE_GPU}: several GPUs are only given whole")
        models = frozenset(m for m in row.text("gpu_spec", "").split("|") if m)
        pods.append(TracePod(gpus, milli, row.count("cpu_milli"), row.count("memory_mib"), models))
    return pods


def read_nodes(path: Path) -> list[Stock]:
    """Return the nodes of ``path`` in the order of the file, all empty.

    Raises:
        InvalidRequest: the file cannot be read, or a row is invalid.
    """
    return [
        Stock(
            row.text("model"),
            row.count("cpu_milli"),
            row.count("memory_mib"),
            (WHOLE_GPU,) * row.count("gpu", maximum=1024),
        )
        for row in _rows(path, ("cpu_milli", "memory_mib", "gpu", "model"))
    ]


def read_pairs(path: Path) -> dict[tuple[str, str], PairRates]:
    """Return the rates of every ordered pair of the jobs in ``path``, by the names of both.

    Raises:
        InvalidRequest: the file cannot be read, a row is invalid, or a pair is missing.
    """
    rates: dict[tuple[str, str], PairRates] = {}
    for row in _rows(path, ("job_a", "job_b", "rate_a", "rate_b")):
        pair = row.text("job_a"), row.text("job_b")
        rates[pair] = min(1.0, row.number("rate_a")), min(1.0, row.number("rate_b"))
    names = sorted({name for pair in rates for name in pair})
    for pair in itertools.product(names, names):
        if pair not in rates:
            raise InvalidRequest(f"{path}: no row has {pair[0]!r} beside {pair[1]!r}; expected every pair")
    return rates


def _gpus(row: _Row, maximum: int | None, owner: str) -> int:
    gpus = row.count("num_gpu", minimum=1)
    if maximum is not None and gpus > maximum:
        raise row.wrong("num_gpu", f"at most {maximum}, the GPUs {owner}")
    return gpus


class _Row:
    """One row, with cells by column name; its errors name file, row and column."""

    def __init__(self, path: Path, number: int, cells: Mapping[str, str]) -> None:
        self._number = number
        self._path = path
        self._cells = cells

    def wrong(self, column: str, expected: str) -> InvalidRequest:
        return _wrong(self._path, self._number, f"{column} is {self._cells[column][:40]!r}", expected)

    def text(self, column: str, default: str | None = None) -> str:
        return self._cells[column] if default is None else self._cells.get(column, default)

    def number(self, column: str) -> float:
        try:
            value = float(self._cells[column])
        except ValueError:
            value = math.nan
        if not 0 <= value <= LARGEST:
            raise self.wrong(column, "a number, 0 or more")
        return value

    def count(self, column: str, *, minimum: int = 0, maximum: int = 1_000_000_000) -> int:
        value = self.number(column)
        if value != int(value) or not minimum <= value <= maximum:
            up_to = f" to {maximum}" if maximum < 1_000_000_000 else " or more"
            raise self.wrong(column, f"a whole number, {minimum}{up_to}")
        return int(value)


def _rows(path: Path, columns: Sequence[str]) -> Iterator[_Row]:
    reader = csv.reader(_lines(path), strict=True)
    try:
        header = next(reader, [])
        missing = [name for name in columns if name not in header]
        if missing:
            found = ", ".join(header)[:120] or "nothing"
            raise _wrong(path, 1, f"the header has {found}", f"the columns {', '.join(columns)}")
        count = 0
        for cells in reader:
            if not cells:
                continue  # an empty line
            if len(cells) != len(header):
                expected = f"{len(header)}, as the header has"
                raise _wrong(path, reader.line_num, f"{len(cells)} columns", expected)
            count += 1
            yield _Row(path, reader.line_num, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise _wrong(path, reader.line_num, str(error), "comma-separated values") from None
    if not count:
        raise _wrong(path, 2, "there is none", "at least one row below the header")


def _lines(path: Path) -> list[str]:
    """Return all lines of a file, plain or gzip."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read ({error.strerror or error})") from None
    if data.startswith(GZIP_MAGIC):
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise InvalidRequest(
                f"{path}: the gzip data is cut or damaged; expected a whole .csv.gz"
            ) from None
    if not data.strip():
        raise _wrong(path, 1, "the file is empty", "a header and rows of comma-separated values")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise _wrong(path, row, "not text in UTF-8", "comma-separated values") from None
    return text.splitlines(keepends=True)


def _wrong(path: Path, row: int, found: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{path}, row {row}: {found}; expected {expected}")
