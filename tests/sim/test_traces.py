"""Files as they are, good ones and bad ones."""

from __future__ import annotations

import gzip

import pytest

from jupyter_gpushare.core.replay import Cell
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.sim.traces import (
    NotebookSession,
    Stock,
    TrainingJob,
    read_cells,
    read_jobs,
    read_nodes,
    read_pods,
)
from tests import traces

JOBS = "job_id,num_gpu,submit_time,iterations,duration\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"


@pytest.fixture
def file(tmp_path):
    """Writes a file and returns its path."""

    def write(content, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_jobs_are_read_from_the_columns_that_matter(file):
    path = file(JOBS + "7,2,0,99,60\n8,1,5.5,99,1e3\n")
    assert read_jobs(path) == [TrainingJob(2, 0.0, 60.0), TrainingJob(1, 5.5, 1000.0)]


@pytest.mark.parametrize("name", ["trace.csv.gz", "trace.csv"])
def test_compressed_files_are_known_by_their_content(file, name):
    path = file(gzip.compress((JOBS + "7,2,0,99,60\n").encode()), name)
    assert len(read_jobs(path)) == 1


def test_line_ends_of_windows_empty_lines_and_a_byte_order_mark_do_no_harm(file):
    path = file(b"\xef\xbb\xbf" + JOBS.replace("\n", "\r\n").encode() + b"1,1,0,0,5\r\n\r\n2,1,0,0,5\r\n")
    assert len(read_jobs(path)) == 2


def test_a_drop_of_submit_time_starts_the_next_session_and_minutes_become_seconds(file):
    path = file("job_id,num_gpu,submit_time,duration\n0,1,10,2\n1,4,20,1\n2,1,5,0.5\n")
    assert read_cells(path) == [
        NotebookSession(4, (Cell(600.0, 120.0), Cell(1200.0, 60.0))),
        NotebookSession(1, (Cell(300.0, 30.0),)),
    ]


def test_pods_and_nodes(file):
    (cpu, half, two) = read_pods(file(PODS + "a,1000,512,0,,,LS\nb,1,2,1,500,T4|A10,LS\nc,1,2,2,1000,,LS\n"))
    assert (cpu.gpus, cpu.gpu_milli) == (0, 0)
    assert (half.gpu_milli, half.models) == (500, {"T4", "A10"})
    assert (two.gpus, two.gpu_milli, two.models) == (2, 1000, frozenset())
    (node,) = read_nodes(file("sn,cpu_milli,memory_mib,gpu,model\nn1,8000,1024,2,T4\n"))
    assert node == Stock("T4", 8000, 1024, (1000, 1000))


def test_pods_without_the_column_of_gpu_models_run_on_any(file):
    columns = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n"
    (half, two) = read_pods(file(columns + "b,1,2,1,500\nc,1,2,2,1000\n"))
    assert (half.gpu_milli, half.models, two.models) == (500, frozenset(), frozenset())


BAD_JOBS = {
    "empty": ("", "row 1: the file is empty; expected a header"),
    "only a header": (JOBS, "row 2: there is none; expected at least one row"),
    "missing columns": (
        "job_id,num_gpu\n1,1\n",
        "row 1: the header has job_id, num_gpu; expected the columns",
    ),
    "negative duration": (JOBS + "1,1,0,0,5\n2,1,1,0,-5\n", "row 3: duration is '-5'; expected a number, 0"),
    "after an empty line": (JOBS + "1,1,0,0,5\n\n2,1,1,0,-5\n", "row 4: duration is '-5'"),
    "negative time": (JOBS + "1,1,-1,0,5\n", "row 2: submit_time is '-1'"),
    "not a number": (JOBS + "1,1,0,0,soon\n", "row 2: duration is 'soon'; expected a number"),
    "nan": (JOBS + "1,1,0,0,nan\n", "row 2: duration is 'nan'"),
    "infinite": (JOBS + "1,1,inf,0,1\n", "row 2: submit_time is 'inf'"),
    "nothing": (JOBS + "1,1,,0,1\n", "row 2: submit_time is ''"),
    "part of a GPU": (JOBS + "1,0.5,0,0,1\n", "row 2: num_gpu is '0.5'; expected a whole number, 1 or more"),
    "no GPU": (JOBS + "1,0,0,0,1\n", "row 2: num_gpu is '0'"),
    "larger than the cluster": (
        JOBS + "1,9,0,0,1\n",
        "row 2: num_gpu is '9'; expected at most 8, the GPUs of the",
    ),
    "unsorted": (JOBS + "1,1,9,0,1\n2,1,8,0,1\n", "row 3: submit_time is '8'; expected at least 9, the row"),
    "short row": (JOBS + "1,1,9\n", "row 2: 3 columns; expected 5, as the header has"),
    "open quote": (JOBS + '1,1,0,0,"5\n', "expected comma-separated values"),
    "not text": (b"\xff\xfe" + JOBS.encode(), "row 1: not text in UTF-8"),
    "cut": (gzip.compress((JOBS + "1,1,0,0,1\n").encode())[:-12], "the gzip data is cut or damaged"),
    "damaged": (b"\x1f\x8b\x08\x00nonsense", "the gzip data is cut or damaged"),
}


@pytest.mark.parametrize(("content", "complaint"), BAD_JOBS.values(), ids=BAD_JOBS)
def test_a_bad_file_is_refused_with_file_row_and_what_was_expected(file, content, complaint):
    path = file(content)
    with pytest.raises(InvalidRequest) as refusal:
        read_jobs(path, max_gpus=8)
    assert str(refusal.value).startswith(str(path))
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match=r"nowhere\.csv: cannot be read \(No such file"):
        read_jobs(tmp_path / "nowhere.csv")


def test_a_session_must_fit_on_a_node(file):
    path = file("num_gpu,submit_time,duration\n1,0,1\n8,1,1\n")
    with pytest.raises(
        InvalidRequest, match="row 3: num_gpu is '8'; expected at most 4, the GPUs of the largest"
    ):
        read_cells(path, max_gpus=4)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("a,1,1,1,1001,,LS", "gpu_milli is '1001'; expected a whole number, 1 to 1000"),
        ("a,1,1,1,0,,LS", "gpu_milli is '0'"),
        ("a,1,1,2,500,,LS", "expected 1000: several GPUs are only given whole"),
        ("a,x,1,0,0,,LS", "cpu_milli is 'x'"),
    ],
)
def test_a_bad_pod_is_refused(file, row, complaint):
    with pytest.raises(InvalidRequest, match="row 2: ") as refusal:
        read_pods(file(PODS + row + "\n"))
    assert complaint in str(refusal.value)


def test_traces_are_read_as_they_are(trace):
    """The public ones, or the made-up ones that replace them."""
    public = bool(traces.FOLDER)
    assert len(read_jobs(trace("training_philly_first5000"))) == (5_000 if public else traces.JOBS)
    assert len(read_jobs(trace("training_philly_0e4a51"))) == (1_435 if public else traces.JOBS)
    assert len(read_jobs(trace("training_tiresias_60"))) == (60 if public else traces.JOBS)
    sessions = read_cells(trace("notebooks_adobe_june2021_60s"))
    assert len(sessions) == (337 if public else traces.SESSIONS)
    assert not public or sum(len(s.cells) for s in sessions) == 30_909
    assert len(read_pods(trace("fractions_openb_pods_default"))) == (8_152 if public else traces.PODS)
    gpus = sum(len(n.gpu_milli) for n in read_nodes(trace("fractions_openb_gpu_nodes")))
    assert gpus == (6_212 if public else 8 * traces.NODES)
