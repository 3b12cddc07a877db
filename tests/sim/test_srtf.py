"""Shortest remaining service, an order of the simulator."""

from __future__ import annotations

from dataclasses import fields

from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import Requeue, Why
from jupyter_gpushare.sim.srtf import SRTF, TraceJob
from tests.core.build import NOW, actions, cluster, started, stops

RULES = {"order": SRTF}


def trace_job(name, on="", *, duration_s, **more):
    job = stops(name, on, **more)
    return TraceJob(**{field.name: getattr(job, field.name) for field in fields(job)}, duration_s=duration_s)


def test_the_job_with_least_left_comes_first_and_preempts():
    long, short = trace_job("long", "0", duration_s=500.0), trace_job("short", duration_s=100.0)
    assert actions(cluster(long, short, **RULES)) == [Requeue("long", Why.ORDER, "short")]
    assert (
        actions(
            cluster(trace_job("half", "0", duration_s=100.0), trace_job("long", duration_s=101.0), **RULES)
        )
        == []
    )
    assert started(cluster(stops("unknown"), trace_job("known", duration_s=9e9), **RULES)) == ["known"]


def test_of_running_jobs_the_one_with_most_left_goes():
    c = cluster(
        trace_job("a", "0", duration_s=500.0, attained_gpu_s=450.0),
        trace_job("b", "1", duration_s=300.0),
        trace_job("short", duration_s=100.0),
        gpus=2,
        **RULES,
    )
    assert actions(c) == [Requeue("b", Why.ORDER, "short")]


def test_a_short_job_must_be_worth_a_preemption():
    long, short = trace_job("long", "0", duration_s=500.0), trace_job("short", duration_s=100.0)
    assert actions(cluster(long, short, preempt_cost_s=101.0, **RULES)) == []
    assert order.gain_gpu_s(stops("x"), NOW, cluster(**RULES).settings) == 0.0
