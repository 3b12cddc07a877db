"""Counters and histograms of what the broker did; the dashboard and the alert rules name them."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import prometheus_client
import pytest
import yaml

from jupyter_gpushare.broker.http import metrics
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.protocol.helper import ComputeShare
from tests.broker.machine import Program

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def text_of(registry: Registry) -> str:
    return prometheus_client.generate_latest(metrics.collectors(registry)).decode()


def names_of(registry: Registry) -> set[str]:
    families = metrics.collectors(registry).collect()
    return {family.name + suffix for family in families for suffix in _SUFFIXES[family.type]}


def value(text: str, sample: str) -> float:
    """Return the value of a sample such as ``name{label="x"}``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"{sample} ")]
    return float(line.rpartition(" ")[2])


async def test_a_lending_a_wait_and_a_wake_are_counted_with_their_seconds(site, broker):
    ada, _ = await site.lent(program=Program(work_s=1_000))
    await site.gpu_cell(ada)
    text = text_of(broker.registry)
    assert value(text, 'gpushare_transitions_total{from="suspended",kind="build",to="resuming"}') == 1
    assert value(text, 'gpushare_decisions_total{action="suspend",why="idle"}') == 1
    assert value(text, "gpushare_suspend_seconds_count") == 2
    for phase in ("waiting", "copying"):
        assert value(text, f'gpushare_wake_seconds_bucket{{le="+Inf",phase="{phase}"}}') == 1
    waited_s = value(text, 'gpushare_queue_wait_seconds_sum{project="nlp"}')
    assert site.policy.idle_timeout_s <= waited_s <= 400
    assert value(text, 'gpushare_queue_wait_seconds_bucket{le="10.0",project="nlp"}') == 0
    assert value(text, 'gpushare_queue_wait_seconds_bucket{le="+Inf",project="nlp"}') == 1
    gpu_s = [value(text, f'gpushare_gpu_seconds_total{{state="{use}"}}') for use in ("lent", "free")]
    assert min(gpu_s) > 0
    assert "ada" not in text


@pytest.mark.site(gpus=1)
async def test_granted_and_measured_shares_are_those_of_the_leases_that_computed_together(site):
    site.policy = replace(site.policy, compute_share=ComputeShare.FAIR)
    broker = await site.start_broker()
    for user, size, measured in [("ada", "1/4", 0.3), ("cy", "1/4", -1.0), ("bo", "1/2", 0.7)]:
        held = await site.session(user, size)
        held.measured_share = measured
    await asyncio.sleep(2)
    text = text_of(broker.registry)
    for name, vision, nlp in [("granted", 0.25, 0.5), ("measured", 0.3, 0.7)]:
        of = f'gpushare_compute_share_{name}_ratio{{device="GPU-0"'
        assert value(text, f'{of},project="vision"}}') == vision
        assert value(text, f'{of},project="nlp"}}') == nlp


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yml"])
async def test_what_is_shipped_for_monitoring_names_metrics_that_exist(site, name):
    text = (MONITORING / name).read_text()
    loaded = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    rules = loaded.get("panels") or loaded["groups"][0]["rules"]
    assert len(rules) >= 7
    known = names_of((await site.start_broker()).registry)
    used = set(re.findall(r"\bgpushare_\w+", text))
    assert used
    assert used <= known
