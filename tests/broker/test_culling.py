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
        ([*MODULE, "--timeout=$TIMEOUT"], Culler("cull", None)),
        ([*MODULE, "--IdleCuller.config_file=/etc/culler.py"], Culler("cull", None)),
        ("jupyterhub-idle-culler --timeout=60", Culler("cull", 60.0)),
        (["python3", "-mjupyterhub_idle_culler", "--timeout=60"], Culler("cull", 60.0)),
        (["sh", "-c", "jupyterhub-idle-culler\t--timeout=60  # don't"], Culler("cull", 60.0)),
        (["python3", "/opt/jupyterhub_idle_culler_notes/backup.py", "--timeout=5"], None),
        ([*MODULE, "--timeout=1e30"], Culler("cull", 1e9)),
        ([*MODULE, "--timeout=nan", "--max-age=inf"], Culler("cull", None, 1e9)),
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


NAMED, DEFAULT, OTHER = ServerKey("ada", "lab"), ServerKey("ada", ""), ServerKey("bo", "")
TWO = "2031-05-06T02:00:00.000000Z"


def test_the_earliest_of_several_cullers_counts() -> None:
    server = HubServer(last_activity="2031-05-06T05:00:00.000000Z", started=TWO)
    slow, fast = Culler("slow", 36_000.0), Culler("fast", 3_600.0)
    culling = Culling((slow, fast), {NAMED: server})
    assert culling.end(NAMED) == SiteEnd("2031-05-06T06:00:00.000Z", "fast")
    assert culling.end(DEFAULT) == SiteEnd("", "slow")  # the Hub has not said when it was used
    old = Culler("old", None, 7_200.0)
    culling = Culling((slow, old), {NAMED: server})
    assert culling.end(NAMED) == SiteEnd("2031-05-06T04:00:00.000Z", "old", is_age=True)
    assert Culling((), {NAMED: server}).end(NAMED) is None


def test_a_culler_leaves_servers_alone_but_not_those_of_its_age() -> None:
    servers = {NAMED: HubServer(started=TWO), DEFAULT: HubServer(started=TWO)}
    culling = Culling((Culler("cull", 600.0, named_servers=False),), servers)
    assert culling.end(NAMED) is None
    assert culling.end(DEFAULT) is not None  # never used: from its start
    culling = Culling((Culler("cull", 600.0, 3_600.0, named_servers=False),), servers)
    assert culling.end(NAMED) == SiteEnd("2031-05-06T03:00:00.000Z", "cull", is_age=True)


def test_what_the_hub_said_before_a_server_stops_counts() -> None:
    used = HubServer(last_activity=TWO)
    culling = Culling()
    culling.saw({NAMED: used, OTHER: used}, [NAMED, DEFAULT])
    assert culling.servers == {NAMED: used}
    # `User.stop` of JupyterHub takes the end of a server for its activity.
    culling.saw({NAMED: HubServer(last_activity="2031-05-06T09:00:00.000000Z", stops=True)}, [NAMED])
    assert culling.servers == {NAMED: used}
    culling.saw({}, [NAMED])
    assert culling.servers == {NAMED: used}
    culling.saw({}, [])
    assert culling.servers == {}


def test_a_time_beyond_all_calendars_is_not_known() -> None:
    never = HubServer(started="9999-12-31T00:00:00.000000Z")
    assert Culling((Culler("cull", 1e9, 1e9),), {NAMED: never}).end(NAMED) == SiteEnd("", "cull")
