"""How often a job tells the Hub that it is active."""

from __future__ import annotations

import pytest

from jupyter_gpushare.job.reports import activity_every_s


@pytest.mark.parametrize(
    ("set_by_the_site", "every_s"),
    [
        ("", 120.0),
        ("30", 30.0),
        ("0", 1.0),
        ("300", 120.0),
        ("often", 120.0),
    ],
)
def test_a_job_reports_as_often_as_servers_are_told_to_and_at_least_every_two_minutes(
    set_by_the_site, every_s
):
    assert activity_every_s({"JUPYTERHUB_ACTIVITY_INTERVAL": set_by_the_site}) == every_s
