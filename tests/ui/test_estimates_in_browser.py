"""Estimates in JupyterLab: when a job starts and ends, in the list, the sidebar and every theme."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import expect

from tests.ui.pages import in_themes, needs_browser, run_command

pytestmark = needs_browser

HOURS = {"key": "range.hours", "args": ["2", "4"]}


def measured(job: dict[str, Any]) -> dict[str, Any]:
    """``job`` as it runs, with an end that is known."""
    end = {"key": "job.ends_in", "args": [HOURS]}
    return job | {
        "reason": "Ends in 2 to 4 h.",
        "reason_texts": [end],
        "left_s": 9_000.0,
        "ends_in": {"low_s": 7_200.0, "high_s": 14_400.0},
    }


@pytest.mark.long
async def test_the_list_says_when_jobs_start_and_end(page, broker, golden):
    running, queued, *others = golden("job_list")["jobs"]
    assert (running["state"], queued["state"]) == ("running", "queued")
    broker.answer("GET jobs", {"jobs": [measured(running), queued, *others]})
    await run_command(page, "gpushare:jobs")
    first, second = (page.locator(f"[data-job={job['id']}]") for job in (running, queued))
    await expect(first).to_contain_text("Ends in 2 to 4 h.")
    # One message in one place: the progress beside it does not say it again.
    await expect(first.get_by_role("gridcell").last).to_have_text("3 of 10")
    await expect(second).to_contain_text("Starts in 20 to 50 min.")
    assert await second.locator("small").evaluate("node => node.scrollWidth <= node.clientWidth")
    await in_themes(page, "list", ".gpushare-jobs")


@pytest.mark.long
async def test_an_estimate_in_the_list_follows_the_broker(page, lab, broker, golden):
    running, queued, *others = golden("job_list")["jobs"]
    broker.answer("GET jobs", {"jobs": [running, queued, *others]})
    await run_command(page, "gpushare:jobs")
    row = page.locator(f"[data-job={queued['id']}]")
    await expect(row).to_contain_text("Starts in 20 to 50 min.")
    texts = [*queued["reason_texts"][:-1], {"key": "job.starts_in", "args": [HOURS]}]
    later = queued | {"reason": "Number 3. Starts in 2 to 4 h.", "reason_texts": texts}
    lab.say(golden("status_active") | {"jobs": [running, later]})
    await expect(row).to_contain_text("Starts in 2 to 4 h.")
    await expect(row).not_to_contain_text("20 to 50 min")
