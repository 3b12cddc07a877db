"""Report a replay: numbers as JSON, as a table, and as a plot over time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from xml.sax.saxutils import escape

from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.sim.fractions import Filled
from jupyter_gpushare.sim.metrics import DAY_HOURS, HOUR_S, ProjectMeter, ReplayMeter, percentile
from jupyter_gpushare.sim.scenario import ReplayResult

Numbers = dict[str, object]


def job_numbers(result: ReplayResult) -> Numbers:
    """Return the figures of the training jobs; times in virtual seconds."""
    meter, replay = result.meter, result.replay
    makespan_s = replay.now - (meter.began_at or 0.0)
    gpu_s = max(result.fleet.gpus * makespan_s, 1e-9)
    done, queued = meter.completion_s, meter.queue_s
    return {
        "jobs": meter.jobs,
        "unfinished": meter.jobs - len(done),
        "avg_completion_s": _short(fmean(done or [0.0])),
        "median_completion_s": _short(percentile(done, 50)),
        "p95_completion_s": _short(percentile(done, 95)),
        "p99_completion_s": _short(percentile(done, 99)),
        "avg_queue_s": _short(fmean(queued or [0.0])),
        "median_queue_s": _short(percentile(queued, 50)),
        "p95_queue_s": _short(percentile(queued, 95)),
        "p99_queue_s": _short(percentile(queued, 99)),
        "makespan_s": _short(makespan_s),
        "utilization": _short(meter.used.total / gpu_s, 4),
        "allocation": _short(meter.allocated.total / gpu_s, 4),
        "preemptions_per_job": _short(meter.preemptions / max(meter.jobs, 1), 4),
        **(sharing_numbers(result) if replay.shares else {}),
        "projects": fairness(meter),
        **engine_numbers(result),
    }


def sharing_numbers(result: ReplayResult) -> Numbers:
    """Return the figures of hosts and guests.

    ``host_speed_p95``: the speed that 95 % of the hosts reach over their whole run, as a part of their speed
    alone.  ``host_speed_beside_p95``: the speed that hosts reach in 95 % of their time with a guest.
    ``guest_time_percent``: GPU time with a guest, of all GPU time.
    """
    meter, replay = result.meter, result.replay
    gpu_s = result.fleet.gpus * (replay.now - (meter.began_at or 0.0))
    speeds = meter.host_speeds
    return {
        "hosts": len(speeds),
        "host_speed_p95": _short(percentile(speeds, 5)) if speeds else None,
        "host_speed_beside_p95": _short(meter.host_speed_beside(95)),
        "guest_time_percent": _percent(meter.guests.total, gpu_s),
        "pairs_parted": meter.parted,
    }


def engine_numbers(result: ReplayResult) -> Numbers:
    """Return the figures of the planner's work."""
    replay, wall_s = result.replay, result.wall_s
    return {
        "rounds": replay.rounds,
        "decisions": replay.decisions,
        "rounds_per_s": _short(replay.rounds / max(wall_s, 1e-9), 1),
        "decisions_per_s": _short(replay.decisions / max(wall_s, 1e-9), 1),
        "wall_s": _short(wall_s),
    }


def notebook_numbers(result: ReplayResult) -> Numbers:
    """Return the figures of the cells and of the idle time between them."""
    meter = result.meter
    return {
        "sessions": meter.sessions,
        "cells": meter.cells,
        "cells_delayed_percent": _percent(meter.cells_lent, meter.cells),
        "p99_delay_s": _short(percentile(meter.waits_s, 99)),
        "max_delay_s": _short(max(meter.waits_s, default=0.0)),
        "cells_waiting_for_cells": meter.cells_crowded,
        "idle_gpu_hours": _short(meter.idle_gpu_s / HOUR_S),
        "idle_available_percent": _percent(meter.available_gpu_s, meter.idle_gpu_s),
        "idle_used_percent": _percent(meter.lent.total, meter.available_gpu_s),
        **engine_numbers(result),
    }


def fraction_numbers(filled: Filled, wall_s: float) -> Numbers:
    """Return the allocation of the filled cluster."""
    return {
        "pods": filled.pods,
        "dropped": filled.dropped,
        "gpus": filled.gpus,
        "allocated_percent_at_100": _short(filled.allocated_at(100.0)),
        "allocated_percent_final": _short(filled.allocated_percent[-1]),
        "wall_s": _short(wall_s),
    }


def fairness(meter: ReplayMeter) -> list[Numbers]:
    """Return the GPU-hours of each project, and its share of over-quota GPU time against its weight.

    A contested day is any 24 hours, by the hour, in which every project always had a
    waiting job.  The figures of contested days are None if there was none.

    ``share_percent``: its share of the over-quota GPU time of contested days.
    ``entitled_percent``: the share that its weight entitles it to.
    ``worst_day_percent``: the largest deviation of a day's share from the entitled share,
    in per cent of that; ``p90_day_percent``: the 90th percentile of the deviations.
    ``longest_owed_s``: the longest time that jobs within its quota waited while the project
    got no capacity.
    """
    projects = list(meter.projects.values())
    days = _contested_days(projects)
    contested = sorted({hour for day in days for hour in range(day, day + DAY_HOURS)})
    over_all = sum(_over(p, hour, 1) for p in projects for hour in contested)
    weights = sum(p.project.weight for p in projects)
    found: list[Numbers] = []
    for p in projects:
        entitled = p.project.weight / weights
        off = [abs(_over(p, day) / _all_over(projects, day) / entitled - 1) for day in days]
        found.append(
            {
                "name": p.project.name,
                "quota_gpus": p.project.quota_milli / WHOLE_GPU,
                "weight": p.project.weight,
                "gpu_hours": _short(p.held.total / HOUR_S),
                "entitled_percent": _short(100 * entitled),
                "share_percent": _percent(sum(_over(p, hour, 1) for hour in contested), over_all)
                if contested
                else None,
                "contested_days": len(days),
                "p90_day_percent": _short(100 * percentile(off, 90)) if off else None,
                "worst_day_percent": _short(100 * max(off)) if off else None,
                "longest_owed_s": _short(p.longest_owed_s),
            }
        )
    return found


def _contested_days(projects: Sequence[ProjectMeter]) -> list[int]:
    """Return the hours at which a contested day begins (`fairness`)."""
    if len(projects) < 2:
        return []
    hours = min(len(p.waiting.hours) for p in projects)
    wanted = [all(p.waiting.hours[h] >= 0.999 * HOUR_S for p in projects) for h in range(hours)]
    days = [h for h in range(hours - DAY_HOURS + 1) if all(wanted[h : h + DAY_HOURS])]
    return [h for h in days if _all_over(projects, h) > 0]


def _over(p: ProjectMeter, hour: int, hours: int = DAY_HOURS) -> float:
    """Return the GPU-seconds beyond quota in the ``hours`` hours, by default a day, from ``hour``."""
    quota = p.project.quota_milli / WHOLE_GPU * HOUR_S
    return sum(max(0.0, held - quota) for held in p.held.hours[hour : hour + hours])


def _all_over(projects: Sequence[ProjectMeter], hour: int) -> float:
    return sum(_over(p, hour) for p in projects)


def table(numbers: Mapping[str, object]) -> str:
    """Return the figures as a table, one per line; lists follow as tables with rows."""
    plain = {name: value for name, value in numbers.items() if not isinstance(value, list)}
    width = max(map(len, plain))
    lines = [f"{name.replace('_', ' '):<{width}}  {_formatted(value)}" for name, value in plain.items()]
    for name, rows in numbers.items():
        if isinstance(rows, list) and len(rows) > 1:
            lines += ["", *_columns(name, rows)]
    return "\n".join(lines)


def _columns(title: str, rows: Sequence[Mapping[str, object]]) -> list[str]:
    cells = [[title, *map(str, list(rows[0])[1:])]]
    cells[0] = [cell.replace("_", " ") for cell in cells[0]]
    cells += [[_formatted(value) for value in row.values()] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def _formatted(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _short(value: float, digits: int = 3) -> float:
    return round(value, digits)


def _percent(part: float, whole: float) -> float:
    return _short(100 * part / whole) if whole else 0.0


# ---- the picture -------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 900, 320, 52, 34, 40
MAX_POINTS = 450
SERIES = (("allocation", "#4c78a8"), ("utilization", "#f58518"))


def plot(result: ReplayResult) -> str:
    """Return an SVG of allocation and utilization over time, in per cent of all GPUs."""
    meter, gpus = result.meter, result.fleet.gpus
    hours = max(len(meter.allocated.hours), 1)
    group = -(-hours // MAX_POINTS)
    curves = {"allocation": meter.allocated.hours, "utilization": meter.used.hours}
    inner_width, inner_height = WIDTH - LEFT - 20, HEIGHT - TOP - BOTTOM

    def x(hour: float) -> float:
        return LEFT + inner_width * hour / hours

    def y(percent: float) -> float:
        return TOP + inner_height * (1 - percent / 100)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(_caption(result))}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for percent in range(0, 101, 25):
        parts.append(
            f'<path d="M{LEFT} {y(percent):.1f}H{LEFT + inner_width}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent} %</text>'
        )
    unit, per_unit = ("days", DAY_HOURS) if hours > 3 * DAY_HOURS else ("hours", 1)
    for step in range(6):
        hour = hours * step / 5
        parts.append(
            f'<text x="{x(hour):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{hour / per_unit:.4g}</text>'
        )
    middle = LEFT + inner_width / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{unit} of virtual time</text>'
    )
    for number, (name, colour) in enumerate(SERIES):
        values = curves[name]
        points = []
        for start in range(0, len(values), group):
            part = values[start : start + group]
            height = y(100 * sum(part) / (len(part) * gpus * HOUR_S))
            points.append(f"{x(start):.1f},{height:.1f}")
        at = LEFT + 130 * number
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            f'<rect x="{at}" y="12" width="14" height="4" fill="{colour}"/>'
            f'<text x="{at + 20}" y="18">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _caption(result: ReplayResult) -> str:
    return f"Allocation and utilization of {result.fleet.gpus} GPUs over time"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: it cannot be written; the previous file stays.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
