"""What a service of the Hub that stops idle servers is told by its command."""

from __future__ import annotations

import pytest

from jupyter_gpushare.backends.base import HubServer, ServerKey
from jupyter_gpushare.broker.state.culling import Culler, Culling, SiteEnd, culler_of

MODULE = ["/opt/tljh/hub/bin/python3", "-m", "jupyterhub_idle_culler"]


@pytest.mark.parametrize(
    ("command", "culler"),
    [
        # TLJH's and Zero to JupyterHub's
        ([*MODULE, "--timeout=600", "--cull-every=60", "--concurrency=5"], Culler("cull", 600.0)),
        ([*MODULE, "--timeout=3600", "--max-age=86400"], Culler("cull", 3600.0, 86400.0)),
        # the package's script, with the values apart
        (["jupyterhub-idle-culler", "--timeout", "7200"], Culler("cull", 7200.0)),
        (["sh", "-c", "exec jupyterhub-idle-culler --timeout=30"], Culler("cull", 30.0)),
        ([*MODULE, "--IdleCuller.timeout=42"], Culler("cull", 42.0)),
        # as JupyterHub's own example was, before it was a package
        (["python3", "cull_idle_servers.py", "--timeout=900"], Culler("cull", 900.0)),
        (MODULE, Culler("cull", 600.0)),  # its default
        ([*MODULE, "--timeout=soon"], Culler("cull", 600.0)),
        ([*MODULE, "--timeout=1e30"], Culler("cull", 1e9)),
        ([*MODULE, "--timeout=nan", "--max-age=inf"], Culler("cull", 0.0, 1e9)),
        ([*MODULE, "--config=/etc/culler.py"], Culler("cull", None)),
        (
            [*MODULE, "--cull-named-servers=False"],
            Culler("cull", 600.0, named_servers=False),
        ),
        (["gpushare", "broker"], None),
        (["sh", "-c", "it's not closed"], None),
        ([], None),
    ],
)
def test_a_command_says_when_servers_are_stopped(command: list[str], culler: Culler | None) -> None:
    assert culler_of("cull", command) == culler


NAMED, DEFAULT = ServerKey("ada", "lab"), ServerKey("ada", "")
TWO = "2031-05-06T02:00:00.000000Z"


def test_the_earliest_of_several_cullers_counts() -> None:
    server = HubServer(last_activity="2031-05-06T05:00:00.000000Z", started=TWO)
    slow, fast = Culler("slow", 36_000.0), Culler("fast", 3_600.0)
    culling = Culling((slow, fast), {NAMED: server})
    assert culling.end(NAMED) == SiteEnd("2031-05-06T06:00:00.000Z", "fast")
    assert culling.end(DEFAULT) is None  # the Hub has no such server
    old = Culler("old", None, 7_200.0)
    culling = Culling((slow, old), {NAMED: server})
    assert culling.end(NAMED) == SiteEnd("2031-05-06T04:00:00.000Z", "old", is_age=True)


def test_servers_that_a_culler_leaves_alone_have_no_end() -> None:
    culling = Culling(
        (Culler("cull", 600.0, 600.0, named_servers=False),),
        {NAMED: HubServer(started=TWO), DEFAULT: HubServer(started=TWO), ServerKey("bo", ""): HubServer()},
    )
    assert culling.end(NAMED) is None
    assert culling.end(DEFAULT) is not None  # never used: from its start
    assert culling.end(ServerKey("bo", "")) is None  # the Hub says nothing of it
