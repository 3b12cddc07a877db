"""``openapi.json``, generated from the table of routes and the messages in `wire`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from jupyter_gpushare import __version__
from jupyter_gpushare.broker.http.routes import ROUTES, Route
from jupyter_gpushare.protocol import wire

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
