"""Read traces: training jobs, notebook cells, pods and nodes; CSV, plain or gzip.

A file is read to its end and checked before anything is simulated.  The first
invalid row is refused with file, row (1 is the header) and what was expected.

==========  ================================================================
training    ``num_gpu`` (whole GPUs), ``submit_time``, ``duration`` (seconds),
            sorted by ``submit_time``
cells       the same columns in *minutes*; rows are grouped by session: a drop
            of ``submit_time`` starts the next session
pods        ``cpu_milli, memory_mib, num_gpu, gpu_milli``, optional
            ``gpu_spec`` (GPU models that will do, ``V100M16|V100M32``)
nodes       ``cpu_milli, memory_mib, gpu, model``
pairs       ``job_a, job_b, rate_a, rate_b``: the part of its speed alone that
            each job has beside the other; 0: both do not fit
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
# The speeds of two jobs beside each other, as parts of those alone.
PairRates = tuple[float, float]
# Beyond it a number is a slip: 30,000 years in seconds.
LARGEST = 1e12


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One job of a trace."""

    gpus: int
    submit_at: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class NotebookSession:
    """The cells of one session, in order; it holds as many GPUs as its largest cell asks for."""

    gpus: int
    cells: tuple[Cell, ...]


class TracePod(NamedTuple):
    """What one pod of a trace requests of one node; pods of equal requests are interchangeable."""

    gpus: int
    gpu_milli: int  # of each GPU
    cpu_milli: int
    memory_mib: int
    models: frozenset[str]  # of GPUs that will do; empty: any


class Stock(NamedTuple):
    """Free resources of a node; nodes with the same stock are interchangeable."""

    model: str
    cpu_milli: int
    memory_mib: int
    gpu_milli: tuple[int, ...]  # per GPU, ascending


def read_jobs(path: Path, *, most_gpus: int | None = None) -> list[TrainingJob]:
    """Return the training jobs of ``path``, by time of submission.

    Raises:
        InvalidRequest: the file cannot be read, or a row is not as expected;
            also a job for more than ``most_gpus`` GPUs.
    """
    jobs: list[TrainingJob] = []
    before = 0.0
    for row in _rows(path, ("num_gpu", "submit_time", "duration")):
        gpus = _gpus(row, most_gpus, "of the cluster")
        submit_at = row.number("submit_time")
        if submit_at < before:
            raise row.wrong("submit_time", f"at least {before:g}, the row before (rows are sorted by time)")
        before = submit_at
        jobs.append(TrainingJob(gpus, submit_at, row.number("duration")))
    return jobs


def read_cells(path: Path, *, most_gpus: int | None = None) -> list[NotebookSession]:
    """Return the notebook sessions of ``path``, times turned from minutes into seconds.

    Raises:
        InvalidRequest: the file cannot be read, or a row is not as expected;
            also a cell for more than ``most_gpus`` GPUs.
    """
    sessions: list[tuple[list[int], list[Cell]]] = []
    for row in _rows(path, ("num_gpu", "submit_time", "duration")):
        cell = Cell(row.number("submit_time") * MINUTE_S, row.number("duration") * MINUTE_S)
        if not sessions or cell.submit_at < sessions[-1][1][-1].submit_at:
            sessions.append(([], []))
        gpus, cells = sessions[-1]
        gpus.append(_gpus(row, most_gpus, "of the largest node: a session has one"))
        cells.append(cell)
    return [NotebookSession(max(gpus), tuple(cells)) for gpus, cells in sessions]


def read_pods(path: Path) -> list[TracePod]:
    """Return the pods of ``path`` in their order.

    Raises:
        InvalidRequest: the file cannot be read, or a row is not as expected.
    """
    pods = []
    for row in _rows(path, ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")):
        gpus = row.count("num_gpu")
        milli = row.count("gpu_milli", least=1 if gpus else 0, most=WHOLE_GPU) if gpus else 0
        if gpus > 1 and milli != WHOLE_GPU:
            raise row.wrong("gpu_milli", f"{WHOLE_GPU}: several GPUs are only given whole")
        models = frozenset(m for m in row.text("gpu_spec", "").split("|") if m)
        pods.append(TracePod(gpus, milli, row.count("cpu_milli"), row.count("memory_mib"), models))
    return pods


def read_nodes(path: Path) -> list[Stock]:
    """Return the nodes of ``path`` in their order, all of them empty.

    Raises:
        InvalidRequest: the file cannot be read, or a row is not as expected.
    """
    return [
        Stock(
            row.text("model"),
            row.count("cpu_milli"),
            row.count("memory_mib"),
            (WHOLE_GPU,) * row.count("gpu", most=1024),
        )
        for row in _rows(path, ("cpu_milli", "memory_mib", "gpu", "model"))
    ]


def read_pairs(path: Path) -> dict[tuple[str, str], PairRates]:
    """Return the rates of every ordered pair of the jobs in ``path``, by their names.

    Raises:
        InvalidRequest: the file cannot be read, a row is not as expected, or a pair is missing.
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


def _gpus(row: _Row, most: int | None, owner: str) -> int:
    gpus = row.count("num_gpu", least=1)
    if most is not None and gpus > most:
        raise row.wrong("num_gpu", f"at most {most}, the GPUs {owner}")
    return gpus


class _Row:
    """One row by column names; its errors name file, row and column."""

    def __init__(self, path: Path, number: int, cells: Mapping[str, str]) -> None:
        self._number = number
        self._path = path
        self._cells = cells

    def wrong(self, column: str, expected: str) -> InvalidRequest:
        return _wrong(self._path, self._number, f"{column} is {self._cells[column][:40]!r}", expected)

    def text(self, column: str, otherwise: str | None = None) -> str:
        return self._cells[column] if otherwise is None else self._cells.get(column, otherwise)

    def number(self, column: str) -> float:
        try:
            value = float(self._cells[column])
        except ValueError:
            value = math.nan
        if not 0 <= value <= LARGEST:
            raise self.wrong(column, "a number, 0 or more")
        return value

    def count(self, column: str, *, least: int = 0, most: int = 1_000_000_000) -> int:
        value = self.number(column)
        if value != int(value) or not least <= value <= most:
            up_to = f" to {most}" if most < 1_000_000_000 else " or more"
            raise self.wrong(column, f"a whole number, {least}{up_to}")
        return int(value)


def _rows(path: Path, columns: Sequence[str]) -> Iterator[_Row]:
    reader = csv.reader(_lines(path), strict=True)
    try:
        header = next(reader, [])
        missing = [name for name in columns if name not in header]
        if missing:
            there = ", ".join(header)[:120] or "nothing"
            raise _wrong(path, 1, f"the header has {there}", f"the columns {', '.join(columns)}")
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
