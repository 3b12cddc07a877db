"""The routes of the REST API, with the messages that each method takes and answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jupyter_gpushare.broker.http import administer, handlers, sizes, spawner
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.protocol import wire


@dataclass(frozen=True, slots=True)
class Route:
    """One path below ``api/v1/`` (``{name}`` is one segment), its handler and its messages."""

    path: str
    handler: type[Base]
    answers: dict[str, Any]  # by method: the type of the answer, None: no content
    takes: dict[str, Any]  # by method: the type of the body
    also: dict[str, Any] = field(default_factory=dict)  # by status, beside success and errors: as ``answers``


_ID = {
    "id": "[a-z0-9]{1,40}",
    "n": "[0-9]{1,6}",
    "name": "[^/]{1,255}",
    "action": "resume|stay-asleep|keep|lend|release|stop|never-sleep|may-sleep",
    "kernel": "[a-z0-9-]{1,64}",
    "trace": "jobs|cells",
    "process": "[0-9]{1,10}-[0-9]{1,20}",
}

ROUTES: tuple[Route, ...] = (
    Route("status", handlers.Status, {"get": wire.Status}, {}),
    Route("offers", handlers.Offers, {"get": wire.Offers}, {}),
    Route("jobs", handlers.Jobs, {"get": wire.JobList, "post": wire.Job}, {"post": wire.JobRequest}),
    Route(
        "jobs/{id}",
        handlers.Job,
        {"get": wire.Job, "put": wire.Job, "delete": wire.Job},
        {"put": wire.JobChange},
    ),
    Route("jobs/{id}/place", handlers.JobPlace, {"put": wire.Job}, {"put": wire.JobPlace}),
    Route("jobs/{id}/timeline", handlers.JobTimeline, {"get": wire.JobTimeline}, {}),
    Route("jobs/{id}/retry", handlers.JobRetry, {"post": wire.Job}, {}),
    Route(
        "jobs/{id}/attempts/{n}/report",
        handlers.JobReport,
        {"post": wire.JobOutcome},
        {"post": wire.JobReport},
        {"204": None},
    ),
    Route("servers/activity", handlers.Activity, {"post": None}, {"post": wire.ActivityReport}),
    Route("servers/gpu", sizes.ServerGpu, {"post": wire.SpawnGrant}, {"post": wire.GpuGain}),
    Route("leases", handlers.Leases, {"get": wire.Leases}, {}),
    Route(
        "leases/{id}/{action}",
        handlers.LeaseAction,
        {"post": wire.LeaseStatus},
        {"post": wire.KeepRequest},
        {"204": None},
    ),
    Route("leases/{id}/size", sizes.LeaseSize, {"put": wire.SizedLease}, {"put": wire.SizeRequest}),
    Route("leases/{id}/kernels/{kernel}/release", handlers.KernelRelease, {"post": dict}, {}, {"307": None}),
    Route("projects", handlers.Projects, {"get": wire.Projects}, {}),
    Route(
        "projects/{name}",
        handlers.Project,
        {"put": wire.Projects, "delete": wire.Projects},
        {"put": wire.ProjectChange},
    ),
    Route(
        "lending", handlers.Lending, {"get": wire.Lending, "put": wire.Lending}, {"put": wire.LendingChange}
    ),
    Route("devices", handlers.Devices, {"get": wire.Devices}, {}),
    Route(
        "devices/{name}/drain",
        administer.DeviceDrain,
        {"put": wire.Devices, "delete": wire.Devices},
        {"put": wire.DrainRequest},
    ),
    Route("devices/{name}/processes/{process}", administer.UnleasedProcess, {"delete": wire.Devices}, {}),
    Route("owners", administer.Owners, {"get": wire.Owners}, {}),
    Route(
        "owners/{name}",
        administer.Owner,
        {"put": wire.Owners, "delete": wire.Owners},
        {"put": wire.Adoption},
    ),
    Route("history", handlers.History, {"get": wire.History}, {}),
    Route("usage", handlers.Usage, {"get": wire.Usage}, {}),
    Route("trace/{trace}", administer.Trace, {"get": wire.Trace}, {}),
    Route("decisions", handlers.Decisions, {"get": wire.Decisions}, {}),
    Route("health", handlers.Health, {"get": wire.Health}, {}, {"503": wire.Health}),
    Route("openapi.json", handlers.OpenApi, {"get": dict}, {}),
    Route("spawner/offers", spawner.SpawnerOffers, {"get": wire.Offers}, {}),
    Route(
        "spawner/start",
        spawner.SpawnerStart,
        {"get": wire.SpawnProgress, "post": wire.SpawnGrant},
        {"post": wire.SpawnRequest},
    ),
    Route(
        "spawner/wait",
        spawner.SpawnerWait,
        {"post": wire.SpawnWait},
        {"post": wire.SpawnRequest},
        {"204": None},
    ),
    Route("spawner/fault", spawner.SpawnerFault, {"post": None}, {"post": wire.SpawnFault}),
    Route("spawner/stop", spawner.SpawnerStop, {"post": None}, {"post": wire.SpawnStop}),
)


def pattern(route: Route) -> str:
    """Return the regular expression of a route's path."""
    path = route.path.replace(".", r"\.")
    for name, expression in _ID.items():
        path = path.replace("{" + name + "}", f"({expression})")
    return path
