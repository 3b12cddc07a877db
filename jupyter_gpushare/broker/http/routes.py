"""The routes of the REST API, with the messages that each method takes and returns."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jupyter_gpushare import __version__
from jupyter_gpushare.broker.http import handlers, spawner
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.protocol import wire


@dataclass(frozen=True, slots=True)
class Route:
    """One path below ``api/v1/`` (``{name}`` is one segment), its handler and its messages."""

    path: str
    handler: type[Base]
    answers: dict[str, Any]  # by method: the type of the answer; None: no content
    takes: dict[str, Any]  # by method: the type of the body
    also: dict[str, Any] = field(default_factory=dict)  # by status: types of other answers than success


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
    Route("status", handlers.StatusHandler, {"get": wire.Status}, {}),
    Route("offers", handlers.OffersHandler, {"get": wire.Offers}, {}),
    Route("jobs", handlers.JobsHandler, {"get": wire.JobList, "post": wire.Job}, {"post": wire.JobRequest}),
    Route(
        "jobs/{id}",
        handlers.JobHandler,
        {"get": wire.Job, "put": wire.Job, "delete": wire.Job},
        {"put": wire.JobChange},
    ),
    Route("jobs/{id}/place", handlers.JobPlaceHandler, {"put": wire.Job}, {"put": wire.JobPlace}),
    Route("jobs/{id}/timeline", handlers.JobTimelineHandler, {"get": wire.JobTimeline}, {}),
    Route("jobs/{id}/retry", handlers.JobRetryHandler, {"post": wire.Job}, {}),
    Route(
        "jobs/{id}/attempts/{n}/report",
        handlers.JobReportHandler,
        {"post": wire.JobOutcome},
        {"post": wire.JobReport},
        {"204": None},
    ),
    Route("servers/activity", handlers.ActivityHandler, {"post": None}, {"post": wire.ActivityReport}),
    Route("leases", handlers.LeasesHandler, {"get": wire.Leases}, {}),
    Route(
        "leases/{id}/{action}",
        handlers.LeaseActionHandler,
        {"post": wire.LeaseStatus},
        {"post": wire.KeepRequest},
        {"204": None},
    ),
    Route("leases/{id}/size", handlers.LeaseSizeHandler, {"put": wire.SizedLease}, {"put": wire.SizeRequest}),
    Route(
        "leases/{id}/kernels/{kernel}/release",
        handlers.KernelReleaseHandler,
        {"post": dict},
        {},
        {"307": None},
    ),
    Route("projects", handlers.ProjectsHandler, {"get": wire.Projects}, {}),
    Route(
        "projects/{name}",
        handlers.ProjectHandler,
        {"put": wire.Projects, "delete": wire.Projects},
        {"put": wire.ProjectChange},
    ),
    Route(
        "lending",
        handlers.LendingHandler,
        {"get": wire.Lending, "put": wire.Lending},
        {"put": wire.LendingChange},
    ),
    Route("devices", handlers.DevicesHandler, {"get": wire.Devices}, {}),
    Route(
        "devices/{name}/drain",
        handlers.DeviceDrainHandler,
        {"put": wire.Devices, "delete": wire.Devices},
        {"put": wire.DrainRequest},
    ),
    Route(
        "devices/{name}/processes/{process}", handlers.UnleasedProcessHandler, {"delete": wire.Devices}, {}
    ),
    Route("owners", handlers.OwnersHandler, {"get": wire.Owners}, {}),
    Route(
        "owners/{name}",
        handlers.OwnerHandler,
        {"put": wire.Owners, "delete": wire.Owners},
        {"put": wire.Adoption},
    ),
    Route("history", handlers.HistoryHandler, {"get": wire.History}, {}),
    Route("usage", handlers.UsageHandler, {"get": wire.Usage}, {}),
    Route("trace/{trace}", handlers.TraceHandler, {"get": wire.Trace}, {}),
    Route("decisions", handlers.DecisionsHandler, {"get": wire.Decisions}, {}),
    Route("health", handlers.HealthHandler, {"get": wire.Health}, {}, {"503": wire.Health}),
    Route("openapi.json", handlers.OpenApiHandler, {"get": dict}, {}),
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


# ---- ``openapi.json``, generated from the routes and the messages in `wire` --

_REF = "#/components/schemas/{name}"


def describe(prefix: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the service at ``prefix``."""
    used = [
        kind
        for route in ROUTES
        for kind in (*route.answers.values(), *route.takes.values())
        if kind not in (None, dict)
    ]
    kinds = list(dict.fromkeys([*used, wire.ErrorAnswer]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for schema in components.values():
        plain = schema.get("properties", {})
        for name in plain:  # `messages.in_english` replaces its default
            if f"{name}_texts" in plain and plain[name].pop("default", None) is not None:
                schema["required"].append(name)
    by_kind = dict(zip(kinds, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jupyter-gpushare",
            "version": __version__,
            "description": "GPU fractions, lending and training jobs for JupyterHub.",
        },
        "servers": [{"url": f"{prefix.rstrip('/')}/api/v1"}],
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "apiKey", "name": "Authorization", "in": "header"}},
        },
        "security": [{"token": []}],
        "paths": {f"/{route.path}": _path(route, by_kind) for route in ROUTES},
    }


def _path(route: Route, by_kind: dict[Any, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": by_kind[wire.ErrorAnswer]}}
    item: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", route.path)
        ]
    }
    for method, kind in route.answers.items():
        created = method == "post" and kind is wire.Job
        answers = {"204" if kind is None else "201" if created else "200": kind, **route.also}
        item[method] = {
            "summary": (route.handler.__doc__ or "").strip().splitlines()[0],
            "responses": {
                **{status: _answer(route, each, by_kind) for status, each in answers.items()},
                "default": {"description": "What is wrong, for people.", "content": error},
            },
        }
        if method in route.takes:
            item[method]["requestBody"] = {
                "content": {"application/json": {"schema": by_kind[route.takes[method]]}}
            }
    return item


def _answer(route: Route, kind: Any, by_kind: dict[Any, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": (route.handler.__doc__ or "").strip()}
    if kind is not None:
        schema = {"type": "object"} if kind is dict else by_kind[kind]
        answer["content"] = {"application/json": {"schema": schema}}
    return answer
