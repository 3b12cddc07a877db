"""Every route, verb and identity: the status of each request, written by hand.

The columns are, from the left: no token; a token that the Hub does not know; a user
without access to this service; bo without the right to submit jobs; bo, the owner of the
job and the lease; ada, of another project; the token of ada's server; an administrator;
a service for metrics; the Hub's spawner.
"""

from __future__ import annotations

import json

import pytest

from jupyter_gpushare.broker.http.routes import ROUTES
from tests.broker.http_site import SPAWNER, Http, example

IDENTITIES = (None, "unknown", "no-access", "bo-reads", "bo", "ada", "ada-server", "root", "prometheus")
IDENTITIES += (SPAWNER,)
START = {"user": "bo", "server": "", "groups": ["nlp"], "uid": 1000, "options": None}

# spawner/fault asks for no token: the Hub is known by the uid of its process, which is that of these tests
# (of other uids: tests/broker/test_site_faults.py).
# {job} is a job of bo that waits; a lease that waits is neither asleep nor awake, so 409 is its owner's.
EXPECTED = """
                                         none unkn noac read  bo  ada serv root prom spwn
GET    status                            401  401  403  200  200  200  200  200  200  401
GET    offers                            401  401  403  200  200  200  200  403  403  401
GET    jobs                              401  401  403  200  200  200  200  200  200  401
POST   jobs                              401  401  403  403  201  201  201  403  403  401
GET    jobs/{job}                        401  401  403  200  200  404  404  200  404  401
PUT    jobs/{job}                        401  401  403  403  200  404  404  200  404  401
PUT    jobs/{job}/place                  401  401  403  403  400  404  404  404  403  401
DELETE jobs/{job}                        401  401  403  403  200  404  404  200  403  401
GET    jobs/{job}/timeline               401  401  403  200  200  404  404  200  404  401
POST   jobs/{job}/retry                  401  401  403  403  409  404  404  404  403  401
POST   jobs/{job}/attempts/1/report      401  401  403  403  403  403  403  403  403  401
POST   servers/activity                  401  401  403  403  403  403  204  403  403  401
GET    leases                            401  401  403  200  200  200  200  200  200  401
POST   leases/{lease}/resume             401  401  403  409  409  404  404  409  404  401
POST   leases/{lease}/keep               401  401  403  200  200  404  404  200  404  401
POST   leases/{lease}/lend               401  401  403  409  409  404  404  409  404  401
POST   leases/{lease}/release            401  401  403  409  409  404  404  409  404  401
POST   leases/{lease}/kernels/k-1/release 401 401  403  409  409  404  404  403  404  401
PUT    leases/{lease}/size               401  401  403  403  409  404  404  404  403  401
GET    projects                          401  401  403  200  200  200  200  200  200  401
GET    trace/jobs                        401  401  403  403  403  403  403  200  403  401
GET    trace/cells                       401  401  403  403  403  403  403  200  403  401
PUT    devices/nlp/drain                 401  401  403  403  403  403  403  404  403  401
DELETE devices/nlp/drain                 401  401  403  403  403  403  403  404  403  401
DELETE devices/nlp/processes/1-1         401  401  403  403  403  403  403  404  403  401
GET    owners                            401  401  403  403  403  403  403  200  403  401
PUT    owners/nlp                        401  401  403  403  403  403  403  404  403  401
DELETE owners/nlp                        401  401  403  403  403  403  403  404  403  401
PUT    projects/nlp                      401  401  403  403  403  403  403  200  403  401
DELETE projects/nlp                      401  401  403  403  403  403  403  200  403  401
POST   leases/{lease}/stay-asleep        401  401  403  409  409  404  404  409  404  401
POST   leases/{lease}/never-sleep        401  401  403  409  409  404  404  409  404  401
POST   leases/{lease}/may-sleep          401  401  403  409  409  404  404  409  404  401
POST   leases/{lease}/stop               401  401  403  403  204  404  404  204  404  401
GET    lending                           401  401  403  200  200  200  200  200  200  401
PUT    lending                           401  401  403  403  403  403  403  200  403  401
GET    devices                           401  401  403  200  200  200  200  200  200  401
GET    history                           401  401  403  200  200  200  200  200  200  401
GET    usage                             401  401  403  200  200  200  200  200  200  401
GET    decisions                         401  401  403  200  200  200  200  200  200  401
GET    health                            200  200  200  200  200  200  200  200  200  200
GET    openapi.json                      200  200  200  200  200  200  200  200  200  200
GET    spawner/offers?group=nlp          403  403  403  403  403  403  403  403  403  200
GET    spawner/start?user=ada            403  403  403  403  403  403  403  403  403  200
POST   spawner/start                     403  403  403  403  403  403  403  403  403  200
POST   spawner/wait                      403  403  403  403  403  403  403  403  403  200
POST   spawner/fault                     204  204  204  204  204  204  204  204  204  204
POST   spawner/stop                      403  403  403  403  403  403  403  403  403  204
"""
TABLE = [
    (cells[0], cells[1], dict(zip(IDENTITIES, map(int, cells[2:]), strict=True)))
    for cells in map(str.split, EXPECTED.strip().splitlines()[1:])
]
TRACES = ("jobs", "cells")
ACTIONS = ("resume", "stay-asleep", "keep", "lend", "release", "never-sleep", "may-sleep", "stop")
BODIES = {
    "PUT jobs/{job}": {"priority": -1},
    "place": {"before": "nosuchjob"},
    "lending": {"mode": "on"},
    "jobs": {"command": ["true"]},
    "report": {"state": "ended", "exit_code": 0},
    "activity": {"kernels": [{"id": "k", "busy": True, "idle_s": 0.0}]},
    "gpu": {"gpus": "1/4", "lease": "b0123456789-1", "borrow": True},
    "keep": {"minutes": 5},
    "size": {"gpus": "0.5"},
    "nlp": {"quota": 0.5},
    "PUT owners/nlp": {"to": None},
    "start": START,
    "wait": START | {"options": {"gpus": 1}},
    "fault": {"message": "no token"},
    "stop": {"user": "bo", "server": ""},
}


def test_the_table_has_every_route_and_verb():
    routes = {
        (method.upper(), example(route.path, action=action, trace=trace))
        for route in ROUTES
        for method in route.answers
        for action in ACTIONS
        for trace in TRACES
    }
    assert routes == {(method, example(path.partition("?")[0])) for method, path, _ in TABLE}


@pytest.mark.parametrize(("method", "path", "expected"), TABLE, ids=[f"{m} {p}" for m, p, _ in TABLE])
async def test_each_identity_may_do_what_the_matrix_says(http: Http, method, path, expected):
    found = {}
    for identity in IDENTITIES:
        job = await http.submit("bo")
        registry = http.broker.registry
        before = registry.jobs[job.id]
        asked = path.format(job=job.id, lease=f"j{job.id}")
        body = BODIES.get(f"{method} {path}") or BODIES.get(asked.rpartition("/")[2])
        answer = await http.ask(method, asked, identity, **({"json": body} if body else {}))
        found[identity] = answer.status_code
        if answer.status_code >= 400:
            assert registry.jobs[job.id] == before, identity
            error = json.loads(answer.content)
            assert error["message"]
            assert job.name not in error["message"]
        if identity not in ("bo", "root") and answer.status_code != 200:
            assert registry.jobs[job.id].result == ""
    assert found == expected


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_other_verbs_are_405_and_say_which_are_allowed(unchanged: Http, route):
    path = example(route.path)
    identity = SPAWNER if path.startswith("spawner/") else "root"
    allowed = {m.upper() for m in route.answers}
    for verb in {"GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"} - allowed:
        answer = await unchanged.ask(verb, path, identity)
        assert answer.status_code == 405, verb
        assert set(answer.headers["Allow"].split(", ")) == allowed
