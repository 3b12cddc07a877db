"""``gpushare simulate``: replay a trace with the scheduler of the broker, and print the figures.

Exit codes: 0 done, 2 invalid arguments or files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jupyter_gpushare import command_line
from jupyter_gpushare.command_line import Option, Parser, Verb
from jupyter_gpushare.core.model import (
    DEFAULT_ORDER,
    DEFAULT_POLICY,
    WHOLE_GPU,
    CheckpointMode,
    JobOrder,
    Order,
    Project,
    Settings,
)
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.gibibytes import GIB
from jupyter_gpushare.sim import fractions, report, synthetic, traces
from jupyter_gpushare.sim.scenario import (
    GPUS_PER_NODE,
    SRTF,
    DeviceFootprint,
    Fleet,
    ReplayResult,
    replay_jobs,
    replay_notebooks,
    some,
)
from jupyter_gpushare.sim.sharing import Sharing, by_turns, side_by_side

# ---- numbers on the command line of `gpushare simulate` ----------------------

count = command_line.count(1, 99_999_999)


def number(minimum: float, expected: str) -> Callable[[str], float]:
    """Return a reader of numbers from ``minimum``; its error says that ``expected`` was expected."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not minimum <= value <= traces.LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return parse


def part(text: str) -> float:
    """Return a number between 0 and 1, both excluded.

    Raises:
        ArgumentTypeError: it is not such a number.
    """
    value = positive(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value


seconds = number(0.0, "a number of seconds, 0 or more")
positive = number(1e-9, "a number above 0")


def share_and_error(text: str) -> tuple[float, float]:
    """Return a share of jobs and the error of their reports, such as ``0.5,0.3``.

    Raises:
        ArgumentTypeError: it is not such a pair.
    """
    try:
        share, sigma = map(float, text.split(","))
    except ValueError:
        share, sigma = -1.0, 0.0
    if not (0 <= share <= 1 and 0 <= sigma <= 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share and an error like 0.5,0.3")
    return share, sigma


def seconds_or(word: str) -> Callable[[str], float | None]:
    """Return a reader of seconds that reads ``word`` as None."""
    return lambda text: None if text == word else seconds(text)


def numbers(minimum: int, maximum: int) -> Callable[[str], list[int]]:
    """Return a reader of comma-separated whole numbers from ``minimum`` to ``maximum``."""
    read = command_line.count(minimum, maximum)
    return lambda text: [read(part) for part in text.split(",")]


# ---- a progress bar for long runs, only on a terminal; it is on standard error and erased at the end

WIDTH = 30
REDRAW_S = 0.2


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows the part of the work that is done, 0 to 1."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    began_at = shown_at = time.monotonic()

    def show(done: float) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now < shown_at + REDRAW_S:
            return
        shown_at = now
        full = round(WIDTH * min(done, 1.0))
        estimate = f", about {(now - began_at) * (1 - done) / done:.0f} s left" if done > 0.02 else ""
        bar = "#" * full + "." * (WIDTH - full)
        print(f"\r[{bar}] {done:4.0%} of the {unit}{estimate}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# ---- the command -------------------------------------------------------------

EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 2, 130

# The orders of a site, and the ideal of a scheduler that knows all durations.
_ORDERS: dict[str, Order | JobOrder] = {order.value: order for order in Order} | {"srtf": SRTF}
# The default part of its GPU's time that a job leaves.
GAPS = 0.5
PLACEMENTS = ("planner", "fgd", "best-fit", "random")
# Options that bound preemptions and waits, and the parameters of the policy that they set.
_BOUNDS = {
    "skip-wait": ("max_bypass_s", "with backfill: seconds for which a job that does not fit is bypassed"),
    "min-run": ("min_run_s", "seconds before which no job is preempted inside its project"),
    "catch-up": ("fairness_horizon_s", "seconds in which a project makes up its lag behind its fair share"),
    "guard": ("starvation_guard_s", "seconds of waiting after which a job comes first"),
}


def main(argv: Sequence[str]) -> int:
    """Run one simulation and return the exit code (see the module's docstring)."""
    args = _parser().parse_args(argv)
    try:
        numbers, result = args.run(args)
        if getattr(args, "plot", None) is not None:
            report.write_whole(args.plot, report.plot(result).encode())
    except InvalidRequest as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or 'a file'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(json.dumps(numbers, indent=2) if args.json else report.table(numbers))
    return EXIT_OK


def _refuse(message: str) -> int:
    print(f"gpushare: {message}", file=sys.stderr)
    return EXIT_USAGE


# ---- arguments --------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="gpushare simulate",
        description="Replay a trace against the very policy that the broker runs, in virtual time.",
        examples=[
            "gpushare simulate make jobs jobs.csv --count 5000 --gpus 64",
            "gpushare simulate jobs jobs.csv --gpus 64",
            "gpushare simulate jobs --help",
        ],
        after="Exit codes: 0 done, 2 invalid arguments or files.",
    )
    parser.add_verbs(_VERBS, Option("--json", "print JSON"), metavar="WHAT")
    return parser


_CLUSTER = (
    Option("--gpus N", "GPUs of the cluster", count, required=True),
    Option("--nodes M", f"nodes of the cluster (default: {GPUS_PER_NODE} GPUs each)", count),
    Option("--islands K", "groups linked by NVLink, per node (default 1)", count, default=1),
    Option(
        "--placement-nodes",
        "none: only the number of GPUs counts, not their place",
        ["all", "none"],
        default="all",
    ),
    Option("--plot FILE.svg", "draw allocation and utilization over time", Path),
    Option("--order", "default %(default)s", list(_ORDERS), default=DEFAULT_ORDER.value),
    Option(
        "--preempt-cost S",
        "seconds for which a stopped job holds its GPUs before it continues (default 0)",
        seconds,
        default=0.0,
    ),
    *(
        Option(
            f"--{flag} S",
            f"{text} (default {getattr(DEFAULT_POLICY, field):g}); none: off, as with "
            "--placement-nodes none and no preemption cost",
            seconds_or("none"),
            dest=field,
            default=argparse.SUPPRESS,
        )
        for flag, (field, text) in _BOUNDS.items()
    ),
)
_JOBS = (
    Option("FILE", "columns num_gpu, submit_time, duration (s)", Path),
    *_CLUSTER,
    Option(
        "--grace S",
        "seconds from telling a job to stop until its GPUs are free (default 0)",
        seconds,
        default=0.0,
    ),
    Option(
        "--checkpoint",
        "how jobs are preempted, as with `gpushare submit`: suspend (default) copies 16 GiB per GPU to host"
        " memory and back at 8 GB/s; sigterm continues from the job's own checkpoint, anywhere (default with"
        " --placement-nodes none, where all GPUs are equal); none starts again; suspend,sigterm suspends"
        " or stops a job, whichever gets it GPUs sooner",
        [mode.value for mode in CheckpointMode],
    ),
    Option(
        "--move",
        "on (default): a suspended job may resume on another GPU of its node; off: as with drivers"
        " before r580, or in containers",
        ["on", "off"],
        default="on",
    ),
    Option(
        "--progress SHARE,SIGMA",
        "with order progress: this share of the jobs reports progress, which estimates the remaining work"
        " with a log-normal error (default 0,0)",
        share_and_error,
        default=(0.0, 0.0),
    ),
    Option(
        "--share",
        "on: waiting jobs run as guests on the unused part of other jobs' GPUs (default off)",
        ["on", "off"],
        default="off",
    ),
    Option(
        "--gaps SHARE",
        "with --share on: part of its GPU's time that each job leaves, for a guest (default 0.5)",
        part,
    ),
    Option(
        "--pair-table FILE",
        "with --share on: pairs that ran side by side, columns job_a, job_b, rate_a, rate_b; an upper limit"
        " for turns",
        Path,
    ),
    Option(
        "--weights W,W,...",
        "as many projects with these weights; job n belongs to project n mod their number",
        numbers(1, 1_000),
    ),
    Option(
        "--quotas G,G,...",
        "guaranteed GPUs of these projects (default: all GPUs to one, 0 to several)",
        numbers(0, 1_000_000),
    ),
)
_NOTEBOOKS = (
    Option("CELLS", "columns num_gpu, submit_time, duration (minutes)", Path, dest="file"),
    *_CLUSTER,
    Option("--jobs FILE", "training jobs, as for `simulate jobs`", Path),
    Option("--saturate", "repeat the jobs, so that small ones always wait"),
    Option(
        "--idle-timeout S",
        "idle seconds after which a session's GPUs may be lent (default 900);"
        " adaptive: learned from each session's past",
        seconds_or("adaptive"),
        default=DEFAULT_POLICY.idle_timeout_s,
    ),
    Option(
        "--notice S",
        "seconds from the notice to the owner until the GPUs are lent, at most a third of the idle"
        " timeout (default 30)",
        seconds,
        default=DEFAULT_POLICY.notice_s,
    ),
    Option("--state-gib G", "GPU memory in use per GPU (default 16)", positive, default=16.0),
    Option("--copy-gbps R", "GB/s of each GPU to host memory and back (default 8)", positive, default=8.0),
    Option(
        "--survival",
        "of jobs: sigterm (default) writes the state and continues anywhere, suspend keeps the place",
        CheckpointMode,
        choices=[CheckpointMode.SIGTERM, CheckpointMode.SUSPEND],
        default=CheckpointMode.SIGTERM,
    ),
    Option("--host-gib G", "host memory for suspended leases (default: enough)", positive),
)
_FRACTIONS = (
    Option("PODS", kind=Path, dest="file"),
    Option("--nodes-file NODES", kind=Path, required=True),
    Option("--placement", "default planner: as the broker places", PLACEMENTS, default="planner"),
    Option("--seed N", "of the order of arrival (default 42)", int, default=42),
)
_MAKE = (
    Option("kind", kind=["jobs", "cells"]),
    Option("FILE", "compressed if it ends in .gz", Path),
    Option("--count N", "jobs or sessions", count, default=1_000),
    Option("--seed N", "default 0", int, default=0),
    Option("--gpus N", "GPUs that the jobs load (default 64)", count, default=64),
    Option("--load L", "part of these GPUs that the jobs request (default 0.9)", positive, default=0.9),
    Option("--days D", "days in which sessions begin (default 14)", positive, default=14.0),
)


# ---- verbs -------------------------------------------------------------------


def _fleet(args: argparse.Namespace) -> Fleet:
    nodes = None if args.placement_nodes == "none" else args.nodes or -(-args.gpus // GPUS_PER_NODE)
    movable = getattr(args, "move", "off") == "on"
    return Fleet(gpus=args.gpus, nodes=nodes, islands=args.islands if nodes else 1, movable=movable)


def _settings(args: argparse.Namespace) -> Settings:
    # If neither placement nor preemption costs anything, nothing is bounded, as in the published ideal.
    ideal = args.placement_nodes == "none" and args.preempt_cost <= 0
    policy = Settings() if ideal else DEFAULT_POLICY
    bounds = {field: getattr(args, field) for field, _ in _BOUNDS.values() if hasattr(args, field)}
    if "min_run_s" in bounds:
        bounds["min_run_s"] = bounds["min_run_s"] or 0.0
    return replace(
        policy,
        order=_ORDERS[args.order],
        preempt_cost_s=args.preempt_cost,
        grace_s=getattr(args, "grace", 0.0),
        idle_timeout_s=getattr(args, "idle_timeout", None) or 0.0,
        notice_s=getattr(args, "notice", 0.0),
        host_budget_bytes=int(args.host_gib * GIB) if getattr(args, "host_gib", None) else 1 << 62,
        **bounds,
    )


def _projects(args: argparse.Namespace) -> list[Project]:
    weights = args.weights or [1] * len(args.quotas or [1])
    quotas = args.quotas or ([args.gpus] if len(weights) == 1 else [0] * len(weights))
    if len(weights) != len(quotas):
        raise InvalidRequest(f"--weights names {len(weights)} projects, --quotas {len(quotas)}")
    if sum(quotas) > args.gpus:
        raise InvalidRequest(f"--quotas guarantee {sum(quotas)} GPUs; the cluster has {args.gpus}")
    pairs = enumerate(zip(weights, quotas, strict=True))
    return [Project(name=f"p{n}", quota_milli=quota * WHOLE_GPU, weight=w) for n, (w, quota) in pairs]


def _sharing(args: argparse.Namespace) -> Sharing | None:
    if args.share == "off":
        if args.gaps or args.pair_table:
            raise InvalidRequest("--gaps and --pair-table need --share on")
        return None
    if args.pair_table is None:
        return by_turns(args.gaps or GAPS)
    if args.gaps:
        raise InvalidRequest("--gaps and --pair-table are two models: give one")
    return side_by_side(traces.read_pairs(args.pair_table))


def jobs(args: argparse.Namespace) -> tuple[report.Numbers, ReplayResult | None]:
    """Training jobs in a queue.

    gpushare simulate jobs philly.csv.gz --gpus 40 --nodes 10 --preempt-cost 30 --progress 0.5,0.3
    gpushare simulate jobs philly.csv.gz --gpus 40 --checkpoint suspend --move off    an older driver
    gpushare simulate jobs philly.csv.gz --gpus 40 --placement-nodes none --json    the published ideal
    gpushare simulate jobs philly.csv.gz --gpus 40 --share on --gaps 0.5    two jobs on one GPU
    gpushare simulate jobs philly.csv.gz --gpus 40 --weights 1,1,2,4 --quotas 0,0,0,8 --plot use.svg
    """
    jobs = traces.read_jobs(args.file, max_gpus=args.gpus)
    sharing = _sharing(args)
    default = CheckpointMode.SIGTERM if args.placement_nodes == "none" else CheckpointMode.SUSPEND
    with progress_bar("jobs") as bar:
        result = replay_jobs(
            jobs,
            _fleet(args),
            _settings(args),
            projects=_projects(args),
            preempt_cost_s=args.preempt_cost,
            survival=CheckpointMode(args.checkpoint) if args.checkpoint else default,
            reports=some(*args.progress),
            sharing=sharing,
            progress=bar,
        )
    return report.job_numbers(result), result


def notebooks(args: argparse.Namespace) -> tuple[report.Numbers, ReplayResult | None]:
    """Notebook sessions that lend their idle GPUs, to training jobs if there are any.

    gpushare simulate notebooks cells.csv.gz --gpus 1200 --nodes 150 --jobs philly.csv.gz --saturate
    gpushare simulate notebooks cells.csv.gz --gpus 64 --jobs jobs.csv --idle-timeout adaptive --json
    """
    fleet = _fleet(args)
    sessions = traces.read_cells(args.file, max_gpus=fleet.largest_node)
    jobs = traces.read_jobs(args.jobs, max_gpus=args.gpus) if args.jobs else []
    if args.saturate and not jobs:
        raise InvalidRequest("--saturate needs jobs to do it with: give --jobs FILE")
    with progress_bar("cells") as bar:
        result = replay_notebooks(
            sessions,
            jobs,
            fleet,
            _settings(args),
            adaptive=args.idle_timeout is None,
            survival=args.survival,
            saturate=args.saturate,
            state=DeviceFootprint(
                bytes_per_gpu=int(args.state_gib * GIB), copy_bytes_per_s=args.copy_gbps * 1e9
            ),
            preempt_cost_s=args.preempt_cost,
            progress=bar,
        )
    numbers = report.notebook_numbers(result)
    return (report.job_numbers(result) | numbers if jobs else numbers), result


def fill(args: argparse.Namespace) -> tuple[report.Numbers, ReplayResult | None]:
    """Pods that ask for parts of GPUs fill a cluster.

    gpushare simulate fractions pods.csv.gz --nodes-file nodes.csv.gz --placement best-fit --seed 42
    """
    pods, nodes = traces.read_pods(args.file), traces.read_nodes(args.nodes_file)
    began = time.perf_counter()
    placement: fractions.Choose | None
    match args.placement:
        case "planner":
            placement = fractions.planner
        case "fgd":
            placement = fractions.fgd(pods)
        case "best-fit":
            placement = fractions.best_fit
        case _:
            placement = None
    filled = fractions.fill(nodes, pods, placement, args.seed)
    return report.fraction_numbers(filled, time.perf_counter() - began), None


def make(args: argparse.Namespace) -> tuple[report.Numbers, ReplayResult | None]:
    """Write a made-up trace (its percentiles: docs/simulator.md).

    gpushare simulate make jobs jobs.csv --count 5000 --gpus 64 --load 0.9
    gpushare simulate make cells cells.csv.gz --count 300 --days 14 --seed 1
    """
    if args.kind == "jobs":
        jobs = synthetic.make_jobs(args.count, gpus=args.gpus, load=args.load, seed=args.seed)
        text, rows = synthetic.jobs_csv(jobs), len(jobs)
    else:
        sessions = synthetic.make_sessions(args.count, days=args.days, seed=args.seed)
        text, rows = synthetic.cells_csv(sessions), sum(len(s.cells) for s in sessions)
    data = gzip.compress(text.encode(), mtime=0) if args.file.suffix == ".gz" else text.encode()
    report.write_whole(args.file, data)
    return {"file": str(args.file), "rows": rows}, None


_VERBS = (
    Verb(jobs, *_JOBS),
    Verb(notebooks, *_NOTEBOOKS),
    Verb(fill, *_FRACTIONS, name="fractions"),
    Verb(make, *_MAKE),
)
