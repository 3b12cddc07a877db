"""``gpushare simulate``: replay a trace with the scheduler of the broker, and print the figures.

Exit codes: 0 done, 2 invalid arguments or files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

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
from jupyter_gpushare.sim.arguments import count, numbers, positive, seconds, seconds_or, share_and_error
from jupyter_gpushare.sim.progress import Bar
from jupyter_gpushare.sim.reporting import some
from jupyter_gpushare.sim.scenario import (
    GPUS_PER_NODE,
    DeviceState,
    Fleet,
    Result,
    replay_jobs,
    replay_notebooks,
)
from jupyter_gpushare.sim.srtf import SRTF

EXIT_OK, EXIT_USAGE, EXIT_INTERRUPTED = 0, 2, 130

# Those of a site, and the ideal of a scheduler that knows all durations.
_ORDERS: dict[str, Order | JobOrder] = {order.value: order for order in Order} | {"srtf": SRTF}
PLACEMENTS = ("fgd", "best-fit", "random")
# Options that bound preemptions and waits, and the parameters of the policy that they set.
_BOUNDS = {
    "skip-wait": ("max_bypass_s", "with backfill: seconds for which a job that does not fit is bypassed"),
    "min-run": ("min_run_s", "seconds before which no job is preempted inside its project"),
    "catch-up": ("fairness_horizon_s", "seconds in which a project makes up its lag behind its fair share"),
    "guard": ("starvation_guard_s", "seconds of waiting after which a job comes first"),
}


def main(argv: Sequence[str]) -> int:
    """Run one simulation and return the exit code (see the module's text)."""
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpushare simulate",
        description="Replay a trace against the very policy that the broker runs, in virtual time.",
        epilog="examples:\n"
        "  gpushare simulate make jobs jobs.csv --count 5000 --gpus 64\n"
        "  gpushare simulate jobs jobs.csv --gpus 64\n"
        "  gpushare simulate jobs --help\n\n"
        "Exit codes: 0 done, 2 invalid arguments or files.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="WHAT", required=True)
    _add_jobs(verbs)
    _add_notebooks(verbs)
    _add_fractions(verbs)
    _add_make(verbs)
    return parser


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], tuple[report.Numbers, Result | None]],
    text: str,
    *examples: str,
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog="examples:\n  " + "\n  ".join(f"gpushare simulate {x}" for x in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.set_defaults(run=run)
    return verb


def _add_jobs(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    jobs = _verb(
        verbs,
        "jobs",
        _jobs,
        "training jobs in a queue",
        "jobs philly.csv.gz --gpus 40 --nodes 10 --preempt-cost 30 --progress 0.5,0.3",
        "jobs philly.csv.gz --gpus 40 --placement-nodes none --json    the published ideal",
        "jobs philly.csv.gz --gpus 40 --weights 1,1,2,4 --quotas 0,0,0,8 --plot use.svg",
    )
    jobs.add_argument("file", type=Path, metavar="FILE", help="columns num_gpu, submit_time, duration (s)")
    _add_cluster(jobs)
    _add_policy(jobs)
    jobs.add_argument(
        "--grace",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds from telling a job to stop until its GPUs are free (default 0)",
    )
    jobs.add_argument(
        "--progress",
        type=share_and_error,
        default=(0.0, 0.0),
        metavar="SHARE,SIGMA",
        help="with order progress: this share of the jobs reports progress, by which the remaining work is "
        "estimated with a log-normal error (default 0,0)",
    )
    jobs.add_argument(
        "--weights",
        type=numbers(1, 1_000),
        metavar="W,W,...",
        help="as many projects with these weights; job n belongs to project n mod their number",
    )
    jobs.add_argument(
        "--quotas",
        type=numbers(0, 1_000_000),
        metavar="G,G,...",
        help="guaranteed GPUs of these projects (default: all GPUs to one, 0 to several)",
    )


def _add_notebooks(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    notebooks = _verb(
        verbs,
        "notebooks",
        _notebooks,
        "notebook sessions that lend their idle GPUs, to training jobs if there are any",
        "notebooks cells.csv.gz --gpus 1200 --nodes 150 --jobs philly.csv.gz --saturate --idle-timeout 900",
        "notebooks cells.csv.gz --gpus 64 --jobs jobs.csv --idle-timeout adaptive --json",
    )
    notebooks.add_argument(
        "file", type=Path, metavar="CELLS", help="columns num_gpu, submit_time, duration (minutes)"
    )
    _add_cluster(notebooks)
    _add_policy(notebooks)
    notebooks.add_argument(
        "--jobs", type=Path, metavar="FILE", help="training jobs, as `simulate jobs` reads"
    )
    notebooks.add_argument(
        "--saturate",
        action="store_true",
        help="the jobs come over and over, so that small ones always wait",
    )
    notebooks.add_argument(
        "--idle-timeout",
        type=seconds_or("adaptive"),
        default=DEFAULT_POLICY.idle_timeout_s,
        metavar="S",
        help="idle seconds after which a session's GPUs may be lent (default 900);"
        " adaptive: learned from each session's past",
    )
    notebooks.add_argument(
        "--notice",
        type=seconds,
        default=DEFAULT_POLICY.notice_s,
        metavar="S",
        help="seconds for which an owner is told before the GPUs are lent, at most a third of the idle"
        " timeout (default 30)",
    )
    notebooks.add_argument(
        "--state-gib",
        type=positive,
        default=16.0,
        metavar="G",
        help="GPU memory in use per GPU (default 16)",
    )
    notebooks.add_argument(
        "--copy-gbps",
        type=positive,
        default=8.0,
        metavar="R",
        help="GB/s of each GPU to host memory and back (default 8)",
    )
    notebooks.add_argument(
        "--survival",
        type=CheckpointMode,
        choices=[CheckpointMode.SIGTERM, CheckpointMode.SUSPEND],
        default=CheckpointMode.SIGTERM,
        help="of jobs: sigterm (default) writes its state and goes on anywhere, suspend keeps its place",
    )
    notebooks.add_argument(
        "--host-gib", type=positive, metavar="G", help="host memory for what sleeps (default: enough)"
    )


def _add_cluster(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--gpus", type=count, required=True, metavar="N", help="of the cluster")
    verb.add_argument(
        "--nodes", type=count, metavar="M", help=f"the GPUs lie on (default: {GPUS_PER_NODE} GPUs each)"
    )
    verb.add_argument(
        "--islands", type=count, default=1, metavar="K", help="groups linked by NVLink, per node (default 1)"
    )
    verb.add_argument(
        "--placement-nodes",
        choices=["all", "none"],
        default="all",
        help="none: GPUs are only counted, any will do together",
    )
    verb.add_argument(
        "--plot", type=Path, metavar="FILE.svg", help="draw allocation and utilization over time"
    )


def _add_policy(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--order", choices=list(_ORDERS), default=DEFAULT_ORDER.value, help="default %(default)s"
    )
    verb.add_argument(
        "--preempt-cost",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds that a preempted job holds its GPUs before it goes on (default 0)",
    )
    for option, (field, text) in _BOUNDS.items():
        verb.add_argument(
            f"--{option}",
            dest=field,
            type=seconds_or("none"),
            default=argparse.SUPPRESS,
            metavar="S",
            help=f"{text} (default {getattr(DEFAULT_POLICY, field):g}); none: off, as with "
            "--placement-nodes none and no preemption cost",
        )


def _add_fractions(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = _verb(
        verbs,
        "fractions",
        _fractions,
        "pods that ask for parts of GPUs fill a cluster",
        "fractions pods.csv.gz --nodes-file nodes.csv.gz --placement fgd --seed 42",
    )
    verb.add_argument("file", type=Path, metavar="PODS")
    verb.add_argument("--nodes-file", type=Path, required=True, metavar="NODES")
    verb.add_argument("--placement", choices=PLACEMENTS, default="fgd", help="default fgd")
    verb.add_argument(
        "--seed", type=int, default=42, metavar="N", help="of the order of arrival (default 42)"
    )


def _add_make(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verb = _verb(
        verbs,
        "make",
        _make,
        "write a made-up trace (its percentiles: docs/simulator.md)",
        "make jobs jobs.csv --count 5000 --gpus 64 --load 0.9",
        "make cells cells.csv.gz --count 300 --days 14 --seed 1",
    )
    verb.add_argument("kind", choices=["jobs", "cells"])
    verb.add_argument("file", type=Path, metavar="FILE", help="compressed if it ends in .gz")
    verb.add_argument("--count", type=count, default=1_000, metavar="N", help="jobs or sessions")
    verb.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    verb.add_argument("--gpus", type=count, default=64, metavar="N", help="that the jobs load (default 64)")
    verb.add_argument(
        "--load", type=positive, default=0.9, metavar="L", help="part of these GPUs asked for (default 0.9)"
    )
    verb.add_argument(
        "--days", type=positive, default=14.0, metavar="D", help="within which sessions begin (default 14)"
    )


# ---- verbs -------------------------------------------------------------------


def _fleet(args: argparse.Namespace) -> Fleet:
    nodes = None if args.placement_nodes == "none" else args.nodes or -(-args.gpus // GPUS_PER_NODE)
    return Fleet(gpus=args.gpus, nodes=nodes, islands=args.islands if nodes else 1)


def _settings(args: argparse.Namespace) -> Settings:
    # Where neither placement nor preemption costs anything, nothing is bounded: the published ideal.
    ideal = args.placement_nodes == "none" and args.preempt_cost <= 0
    policy = Settings() if ideal else DEFAULT_POLICY
    given = {field: getattr(args, field) for field, _ in _BOUNDS.values() if hasattr(args, field)}
    if "min_run_s" in given:
        given["min_run_s"] = given["min_run_s"] or 0.0
    return replace(
        policy,
        order=_ORDERS[args.order],
        preempt_cost_s=args.preempt_cost,
        idle_timeout_s=getattr(args, "idle_timeout", None) or 0.0,
        notice_s=getattr(args, "notice", 0.0),
        host_budget_bytes=int(args.host_gib * GIB) if getattr(args, "host_gib", None) else 1 << 62,
        **given,
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


def _jobs(args: argparse.Namespace) -> tuple[report.Numbers, Result | None]:
    jobs = traces.read_jobs(args.file, most_gpus=args.gpus)
    with Bar("jobs") as bar:
        result = replay_jobs(
            jobs,
            _fleet(args),
            _settings(args),
            projects=_projects(args),
            preempt_cost_s=args.preempt_cost,
            grace_s=args.grace,
            reports=some(*args.progress),
            progress=bar,
        )
    return report.job_numbers(result), result


def _notebooks(args: argparse.Namespace) -> tuple[report.Numbers, Result | None]:
    fleet = _fleet(args)
    sessions = traces.read_cells(args.file, most_gpus=fleet.largest_node)
    jobs = traces.read_jobs(args.jobs, most_gpus=args.gpus) if args.jobs else []
    if args.saturate and not jobs:
        raise InvalidRequest("--saturate needs jobs to do it with: give --jobs FILE")
    with Bar("cells") as bar:
        result = replay_notebooks(
            sessions,
            jobs,
            fleet,
            _settings(args),
            adaptive=args.idle_timeout is None,
            survival=args.survival,
            saturate=args.saturate,
            state=DeviceState(bytes_per_gpu=int(args.state_gib * GIB), copy_bytes_per_s=args.copy_gbps * 1e9),
            preempt_cost_s=args.preempt_cost,
            progress=bar,
        )
    numbers = report.notebook_numbers(result)
    return (report.job_numbers(result) | numbers if jobs else numbers), result


def _fractions(args: argparse.Namespace) -> tuple[report.Numbers, Result | None]:
    pods, nodes = traces.read_pods(args.file), traces.read_nodes(args.nodes_file)
    began = time.perf_counter()
    placement: fractions.Choose | None
    match args.placement:
        case "fgd":
            placement = fractions.product(pods)
        case "best-fit":
            placement = fractions.best_fit
        case _:
            placement = None
    filled = fractions.fill(nodes, pods, placement, args.seed)
    return report.fraction_numbers(filled, time.perf_counter() - began), None


def _make(args: argparse.Namespace) -> tuple[report.Numbers, Result | None]:
    if args.kind == "jobs":
        jobs = synthetic.make_jobs(args.count, gpus=args.gpus, load=args.load, seed=args.seed)
        text, rows = synthetic.jobs_csv(jobs), len(jobs)
    else:
        sessions = synthetic.make_sessions(args.count, days=args.days, seed=args.seed)
        text, rows = synthetic.cells_csv(sessions), sum(len(s.cells) for s in sessions)
    data = gzip.compress(text.encode(), mtime=0) if args.file.suffix == ".gz" else text.encode()
    report.write_whole(args.file, data)
    return {"file": str(args.file), "rows": rows}, None
