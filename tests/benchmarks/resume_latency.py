"""Measure the time from a CUDA call of a sleeping session to its return, with a free device.

``.venv/bin/python -m tests.benchmarks.resume_latency [times]``

The demo Hub has one simulated GPU, whose copies take no time.  Ada's server holds
half of it and is offered at once (``leases/{id}/lend``).  A short job of bo that
needs the whole GPU puts it to sleep and ends.  Then her process makes one CUDA
call.  The time covers the library's counter, the helper's poll, the broker's
decision, restore and unlock.
"""

from __future__ import annotations

import statistics
import sys

import httpx

from tests.benchmarks.demo_hub import DemoHub, demo_hub, until
from tests.benchmarks.report import percentile, print_table

SIMULATE = "1xH100-80GB,host=512GiB"


def lease_of(broker: httpx.Client) -> dict[str, object]:
    (lease,) = broker.get("leases").raise_for_status().json()["leases"]
    return dict(lease)


def put_to_sleep(ada: httpx.Client, bo: httpx.Client) -> None:
    """Lend ada's GPU to a job of bo that does nothing; return when the job has ended."""
    job = bo.post("jobs", json={"command": ["true"], "gpus": "1"}).raise_for_status().json()["id"]
    until(lambda: asleep_or_offered(ada), "ada is asleep", pause_s=1)
    until(lambda: bo.get(f"jobs/{job}").json()["state"] == "succeeded", "the job has ended")
    until(lambda: not bo.get("leases").json()["leases"], "its room is free")


def asleep_or_offered(ada: httpx.Client) -> bool:
    """Return whether ada is asleep; offer an awake session, again after a call that revoked the offer."""
    lease = lease_of(ada)
    if lease["state"] == "running":
        ada.post(f"leases/{lease['id']}/lend", json={})
    return lease["state"] == "suspended"


def wake(hub: DemoHub) -> float:
    """Return the milliseconds that ada's CUDA call took."""
    url = f"{hub.server('ada')['url']}call"
    return float(hub.http.get(url).raise_for_status().text)


def main(times: int) -> None:
    took_ms = []
    with demo_hub(simulate=SIMULATE) as hub, hub.broker("ada") as ada, hub.broker("bo") as bo:
        hub.start("ada", {"gpushare": {"fraction": "0.5"}})
        hub.hold("ada")
        awake_ms = [wake(hub) for _ in range(20)]
        for _ in range(times):
            put_to_sleep(ada, bo)
            took_ms.append(wake(hub))
    print_table(
        "tests.benchmarks.resume_latency",
        [f"ms ({times} times)", "p50", "p95", "max"],
        [
            ["CUDA call to its return, asleep before"]
            + [f"{x:.0f}" for x in (statistics.median(took_ms), percentile(took_ms, 95), max(took_ms))],
            ["the same call, awake"]
            + [f"{x:.2f}" for x in (statistics.median(awake_ms), percentile(awake_ms, 95), max(awake_ms))],
        ],
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
