"""The scenarios of tests/gpu_real, scaled down, on the simulated driver: the same code paths."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from jupyter_gpushare.gpu.leases.journal import SELF_TEST_PREFIX
from tests.gpu.machine import MIB, until
from tests.gpu_real import callers, driver_facts, other_gpu, scenarios, shares, survival, timing
from tests.gpu_real.bench import Bench
from tests.gpu_real.order import SCENARIOS, Scenario
from tests.gpu_real.site import ROOT, Helper, Report, Site, Skip
from tests.simulator import Fault, Simulator

#: They open the driver in their own process, so they are run in one.
APART = [
    each
    for each in SCENARIOS
    if each.function
    in (
        driver_facts.these_calls_wait_while_a_process_is_locked,
        driver_facts.these_calls_end_a_process_while_it_is_checkpointed,
        driver_facts.a_process_that_only_called_cu_init_is_listed,
        driver_facts.a_restore_without_memory_leaves_the_process_in_a_state,
        driver_facts.a_helper_without_root_may_not_lock,
    )
]
#: As APART, by module: the options of the machine, and parts of rows that this driver makes certain.
OF_LIFE = {
    survival: (
        "copy=2GiB/s",
        {
            "graph: replay before and after a suspension by the helper": "ok, ok",
            "children, suspended with 2 forked children": r"^done, 0 MiB of \d\d\d MiB, ok",
            "children, killed with forked children alive": r"^not .*MiB with 2 alive, .*; \d+ ms",
            "managed_variable, the driver alone": r"Checkpoint 801 \(LOCKED\), Unlock 0 .*; memory bad",
            "exported, the driver alone": r"Checkpoint 801 \(LOCKED\), Unlock 0 .*; memory bad",
            "exported in a lease": "it uses memory shared with another process or with graphics; memory ok",
        },
    ),
    timing: (
        "free-delay=400",
        {
            "lag after Checkpoint": r"\d+ ms, \d+ ms",
            "lag after SIGKILL": r"\d+ ms, ([4-9]|\d\d)\d\d ms",
            "Lock within 1 s, in a kernel of 2 s": r"^600, .*, RUNNING; nothing to .*; kernel ok, memory ok",
            "Lock within 30 s, in a kernel of 2 s": r"^0, .*, LOCKED; Unlock 0 .*; kernel ok, memory ok",
        },
    ),
    callers: (
        "copy=1GiB/s,caller-dies=done",
        {
            "caller killed in checkpoint": r"^in the call, .*CHECKPOINTED; Restore 0, Unlock 0 .*; ok",
            "caller killed in restore": r"^in the call, .*LOCKED; Unlock 0 \(RUNNING\); ok",
            "helper killed in suspend": "done, ok",
            "helper killed in resume": "done, ok",
        },
    ),
    other_gpu: (
        "growth=0",
        {
            "restored from GPU A on B: codes": r"one pair 1, all pairs 0, Unlock 0 \(RUNNING\); memory ok",
            "restored from GPU B on A: codes": r"all pairs 0, Unlock 0 \(RUNNING\); memory ok",
            "restored from GPU A on B: ordinal": r"0 A,B (0\S+) -> 0 B,A \1; A not listed, B \d+ MiB",
            "it sees GPU A alone, restored on B: codes": r"the pair 0, Unlock 0 \(RUNNING\); memory ok",
            "it sees GPU A alone, restored on B: ordinal": r"0 A (0\S+) -> 0 B \1; A not listed, B \d+ MiB",
            "it sees GPU A alone, restored on B: a process that": r"A \d+ MiB, B not listed",
        },
    ),
}
#: Rows of `shares` on this driver, by scenario; and why it may skip one.
OF_TIME = {
    shares.two_tenants_divide_the_time: {
        "two processes, kernels of 10 and 10 ms": r"^\d+%, \d+%; together \d+%",
        "one process beside three": r"^(\d+%, ){3}\d+%; together",
    },
    shares.what_is_queued_drains: {"drain of 10 kernels, 10 ms ahead": r"^p50 \d+\.\d+ ms, p99"},
    shares.a_record_disturbs_nothing: {
        "one cuCtxRecordEvent": r"us, \d+\.\d ms at",
        "a short kernel in another stream": "not ordered by it",
        "records and waits beside": "us a record",
    },
    shares.nvml_tells_who_computed: {"kernels of 10 ms, the second pauses 30 ms": r"%, \d+% and \d+%$"},
    shares.turns_keep_the_throughput: {"two processes, kernels of 1 ms, turns of 100 ms": r"and \d+, .*%$"},
    shares.a_record_meets_a_capture: {"record by a thread in mode relaxed": "^global .*relaxed"},
    shares.turns_of_the_package_hold: {"turns of leases of 1/4 and 3/4, kernels of 10 ms": "of it, .*% and"},
    shares.a_turn_adds_to_a_launch: {"a launch in a turn": "ns$"},
    shares.a_guest_has_what_its_host_leaves: {
        "a host computes and pauses": r"^\d+%, \d+%, \d\.\d+$",
        "an allocation of the host": "ms, a guest of",
    },
    shares.the_slice_of_the_driver_can_be_set: {},
}
NOT_OF_TIME = ("this driver has no ", "no turns here: ", "no nvidia-smi")
# Those of "the driver" are run by the commands below.
HERE = [
    each
    for each in SCENARIOS
    if each.everywhere
    and each not in APART
    and sys.modules[each.function.__module__] not in (*OF_LIFE, shares)
    and not each.name.startswith("the_driver")
]
#: On a bare GPU machine there is the standard library, nvidia-ml-py, psutil, pytest and maybe torch.
BARE = """
import sys
for name in ("msgspec", "tornado", "jupyter_client", "jupyterhub", "traitlets", "httpx", "sqlalchemy"):
    sys.modules[name] = None
"""


#: Where the driver hides bytes the others run in `make test-long`.
SHOWN_BLIND = (
    "the_self_test_gives_a_verdict",
    "memory_comes_back_as_it_was-1",
    "a_restore_without_memory_leaves_the_process_in_a_state",
    "a_limit_holds_for_all_processes_of_a_lease_together",
    "a_process_around_the_library_is_noticed",
)


def environment(machine: Simulator) -> dict[str, str]:
    return machine.env(GPUSHARE_TEST_RUN=os.environ.get("GPUSHARE_TEST_RUN", ""))


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """The folder of a helper, and what a process on its machine has in its environment."""
    folder = tmp_path_factory.mktemp("site")
    env = environment(Simulator(folder, "1xH100-80GB,host=512GiB"))
    helper = Helper(folder, env, 0.2)
    yield folder, env
    helper.close()


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bench]]:
    """A bench by what the driver says of a process's memory: most likely a container with its own pids."""
    benches = {}
    for listed in ("zero", "unavailable"):
        folder = tmp_path_factory.mktemp(listed)
        env = environment(Simulator(folder, f"1xH100-80GB,host=512GiB,bytes={listed}"))
        benches[listed] = Bench(folder, env, out=None, budget_s=600)
    yield benches
    for bench in benches.values():
        bench.close()


def shown_here() -> Iterator[object]:
    """Each scenario once; the slow one, and others with more arguments, in `make test-long`."""
    seen = {driver_facts.a_process_grows_over_cycles}
    for each in HERE:
        again = each.function in seen
        yield pytest.param(each, id=each.name, marks=[pytest.mark.long] if again else [])
        seen.add(each.function)


@pytest.mark.parametrize("scenario", list(shown_here()))
def test_simulated(
    helper: tuple[Path, dict[str, str]], scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, env = helper
    site = Site(folder, env, Report(), scale_bytes=4 * MIB, sample_s=0.2)
    try:
        scenario.function(site, *scenario.given)
    except Skip as why:
        pytest.skip(str(why))
    finally:
        site.close()
    assert site.report.rows


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_fact_about_the_driver_is_reported(tmp_path: Path) -> None:
    machine = Simulator(
        tmp_path, "1xH100-80GB,host=512GiB,lost=checkpointed,listed=initialized,checkpoint=root"
    )
    with closing(Bench(tmp_path, environment(machine), out=None, budget_s=600)) as bench:
        shown = {each.name: bench.run(each) for each in APART}
    assert {name: (each.outcome, each.reason) for name, each in shown.items()} == dict.fromkeys(
        shown, ("passed", "")
    )
    figures = {what: figure for each in shown.values() for what, figure in each.rows}
    assert figures["cuInit alone: bytes listed, code of GetState, of Lock"] == "0, 3, 3"
    restored = "restore without memory: code, state, code again, code with memory free again, Unlock"
    assert figures[restored] == "2, CHECKPOINTED, 304, 304, 401"
    assert figures["Lock by another user"] == "code 304"
    waiting = figures["calls that wait under Lock, with the system call"]
    assert "cuMemAlloc_v2" in waiting
    assert "cuCtxSynchronize" not in waiting
    ends = figures["calls that end a checkpointed process"].split(", ")
    assert ends == [
        f"{name} (SIGSEGV)"
        for name in (
            "cuCtxSynchronize", "cuStreamSynchronize", "cuStreamQuery", "cuEventSynchronize", "cuEventQuery",
                "cuEventElapsedTime_v2",
        )
    ]  # fmt: skip
    assert "cuDriverGetVersion" not in waiting


@pytest.mark.parametrize("module", OF_LIFE, ids=lambda module: module.__name__.rpartition(".")[2])
def test_what_lives_across_a_suspension_is_reported(tmp_path: Path, module: ModuleType) -> None:
    options, rows = OF_LIFE[module]
    machine = Simulator(tmp_path, f"2xH100-80GB,host=512GiB,{options}")
    with closing(Bench(tmp_path, environment(machine), out=None, budget_s=600)) as bench:
        shown = [bench.run(each) for each in SCENARIOS if sys.modules[each.function.__module__] is module]
    assert {each.scenario: (each.outcome, each.reason) for each in shown} == {
        each.scenario: ("passed", "") for each in shown
    }
    figures = {what: figure for each in shown for what, figure in each.rows}
    for what, pattern in rows.items():
        (figure,) = (figure for name, figure in figures.items() if name.startswith(what))
        assert re.search(pattern, figure), (what, figure)


@pytest.mark.parametrize(
    "functions",
    [[*OF_TIME][:3], pytest.param([*OF_TIME][3:], marks=pytest.mark.long)],
    ids=["facts", "turns"],
)
def test_how_time_is_divided_is_reported(tmp_path: Path, functions: list[Callable[..., None]]) -> None:
    machine = Simulator(tmp_path, "1xH100-80GB,host=512GiB")
    with closing(Bench(tmp_path, environment(machine), out=None, budget_s=600)) as bench:
        shown = [(each.function, bench.run(each)) for each in SCENARIOS if each.function in functions]
    for function, result in shown:
        if result.outcome == "skipped":
            assert result.reason.startswith(NOT_OF_TIME), result
            continue
        assert (result.outcome, result.reason) == ("passed", "")
        for what, pattern in OF_TIME[function].items():
            (figure,) = (figure for name, figure in result.rows if name.startswith(what))
            assert re.search(pattern, figure), (what, figure)


def test_a_move_is_reported_where_unused_gpus_are_not_named_and_the_old_uuid_is_seen(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "2xH100-80GB,host=512GiB,growth=0,pairs=used,moved-uuid=old")
    with closing(Bench(tmp_path, environment(machine), out=None, budget_s=600)) as bench:
        (shown,) = (bench.run(each) for each in SCENARIOS if each.name == "a_process_moves_to_another_gpu")
    assert (shown.outcome, shown.reason) == ("passed", "")
    figures = dict(shown.rows)
    assert "one pair 0, Unlock 0 (RUNNING); memory ok" in figures["restored from GPU A on B: codes"]
    back = figures["restored from GPU B on A: codes"]
    assert "all pairs 1, one pair 0, Unlock 0 (RUNNING); memory ok" in back
    (seen,) = (figure for what, figure in shown.rows if what.startswith("restored from GPU A on B: ordinal"))
    assert re.match(r"0 (A,B \S+) -> 0 \1; A not listed, B \d+ MiB", seen)


def test_on_one_gpu_with_bytes_hidden_there_is_an_answer_or_a_reason(tmp_path: Path) -> None:
    """A container: the helper cannot suspend there, the driver's calls can."""
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    machine = Simulator(tmp_path, "1xH100-80GB,host=512GiB,bytes=unavailable")
    with closing(Bench(tmp_path, environment(machine), out=None, budget_s=600)) as bench:
        graph = bench.run(by_name["a_graph_is_launched_again_after_a_suspension"])
        move = bench.run(by_name["a_process_moves_to_another_gpu"])
    what = "graph: replay before and after a suspension by the driver"
    assert (graph.outcome, graph.rows) == ("passed", [[what, "ok, ok"]])
    assert (move.outcome, move.reason) == ("skipped", "there are not two equal devices")


def test_between_two_scenarios_a_self_test_goes_on(tmp_path: Path) -> None:
    """The helper tests a device again after its driver failed: its process is in no scenario's lease."""
    env = environment(Simulator(tmp_path, "1xH100-80GB,host=512GiB"))
    helper = Helper(tmp_path, env, 0.2)
    started = []
    try:
        for name in (f"{SELF_TEST_PREFIX}0", "left"):
            leased = env | {"GPUSHARE_LEASE_DIR": str(tmp_path / "state" / "leases" / name)}
            started.append(subprocess.Popen(["sleep", "60"], env=leased))
        assert helper.clear(20)
        assert started[1].wait(20)
        assert started[0].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()
        helper.close()


def command(tmp_path: Path, part: str, chosen: str) -> subprocess.CompletedProcess[str]:
    """Run what `make test-gpu` runs, on a simulated machine, with the packages of a bare one.

    Every user can reach the simulated driver, as a real one; pytest's folder is its user's alone.
    """
    machine = Path(tempfile.mkdtemp(dir="/tmp"))
    machine.chmod(0o755)
    arguments = [
        sys.executable, "-c", BARE + "import pytest; sys.exit(pytest.main(sys.argv[1:]))",
        "-c", "/dev/null", f"--rootdir={ROOT}", "-p", "no:cacheprovider", "--import-mode=importlib",
        "-ra", "-s", "tests/gpu_real", "-k", chosen, f"--basetemp={tmp_path / 'base'}",
    ]  # fmt: skip
    env = environment(Simulator(machine, "1xH100-80GB,host=512GiB")) | {
        "OUT": str(tmp_path / "new" / "out"),
        "PART": part,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    try:
        return subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    finally:
        shutil.rmtree(machine)


def test_the_command_shows_skips_and_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    done = command(tmp_path, "", "the_driver_is or itself-1 or the_self_test or adds_to_a_training")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "new" / "out" / "all"
    kept = json.loads((out / "gpu.json").read_text())
    assert kept["simulated"]
    assert [(each["outcome"], bool(each["rows"])) for each in kept["results"]] == [
        ("passed", True), ("passed", True), ("passed", True), ("skipped", False),
    ]  # fmt: skip
    assert kept["results"][3]["reason"] == "frameworks do not run on the simulated driver"
    assert "proves the code, not the GPU" in (out / "gpu.md").read_text()
    if os.geteuid() == 0:
        assert "self-test uid=65534" in (out / "helper.log").read_text()
    for what, figure in kept["results"][0]["rows"]:
        assert f"| {what} | {figure} |" in done.stdout


def test_a_part_is_repeated_alone_and_overwrites_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        done = command(tmp_path, "2", "symbols")
        assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "new" / "out"
    assert sorted(each.name for each in out.iterdir()) == ["part-2", "part-2-2"]
    rows = [(run / "rows" / "entry_points_are_their_symbols.jsonl").read_text() for run in out.iterdir()]
    assert rows[0] == rows[1]
    assert "no symbol of hooks.h" in rows[0]
    refused = command(tmp_path, "6", "symbols")
    assert refused.returncode
    assert "PART is 1 to 5" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, id=each.name, marks=[] if each.name in SHOWN_BLIND else [pytest.mark.long])
        for each in SCENARIOS
        if each.everywhere
    ],
)
@pytest.mark.parametrize("listed", ["zero", "unavailable"])
def test_where_the_driver_hides_bytes_each_scenario_runs_or_says_why_not(
    blind: dict[str, Bench], listed: str, scenario: Scenario
) -> None:
    shown = blind[listed].run(scenario)
    assert shown.outcome != "failed", shown.reason
    if shown.outcome == "skipped" and not shown.reason.startswith(NOT_OF_TIME):
        assert "the driver does not say how much memory a process holds here" in shown.reason
    if scenario.function in (
        scenarios.a_limit_holds_for_all_processes_of_a_lease_together,
        driver_facts.a_restore_without_memory_leaves_the_process_in_a_state,
    ):
        assert shown.outcome == "passed"


def test_where_the_helper_cannot_suspend_the_driver_is_measured_by_itself(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "1xH100-80GB,host=512GiB")
    machine.fault(Fault.LOCK_TIMEOUT)  # the self-test's
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    with closing(Bench(tmp_path, environment(machine), out=None, budget_s=600)) as bench:
        skipped = bench.run(by_name["memory_comes_back_as_it_was-8"])
        assert (skipped.outcome, "cannot suspend" in skipped.reason) == ("skipped", True)
        shown = bench.run(by_name["the_driver_moves_a_process_by_itself-8"])
        assert (shown.outcome, shown.rows[0][0]) == ("passed", "Lock, Checkpoint and Restore of 0.0312 GiB")


def test_what_hangs_or_kills_the_helper_costs_the_others_nothing(tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "1xH100-80GB,host=512GiB")
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    context = by_name["a_context_has_its_price"]
    with closing(Bench(tmp_path, environment(machine), out=None, budget_s=600)) as bench:
        assert bench.run(by_name["the_self_test_gives_a_verdict"]).outcome == "passed"
        machine.fault(Fault.HANG_CALL, count=-1, value=600_000)
        late = bench.run(replace(context, limit_s=4.0))
        assert late.outcome == "failed"
        assert late.reason.splitlines()[-1].endswith("not done after 4 s")
        assert (tmp_path / "gpu.json").exists()
        machine.clear_faults()
        assert bench.run(context).outcome == "passed"
        assert bench.helper
        bench.helper.kill()
        assert bench.run(context).outcome == "passed"
        machine.fault(Fault.DEVICE_LOST, count=-1)
        until(bench.helper.ill, "the loss is noticed")
        lost = bench.run(context)
        assert (lost.outcome, "out of service" in lost.reason) == ("skipped", True)
        assert "not done after 4 s" in bench.table()
    ended = Bench(tmp_path, environment(machine), out=None, budget_s=0)
    assert ended.run(context).reason == "no time is left"
