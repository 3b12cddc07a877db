"""``user_options["gpushare"]``: a user's request for a GPU, from the form or the REST API.

The options cannot be trusted, and later starts get them from the Hub's database, so `read` checks
types and ranges every time.  The broker checks rights and capacity.

`from_form` turns the fields of the form (`SIZE_FIELD`, ...) into the same options.  `read` checks
them, however they came.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jupyter_gpushare.core.size import memory_of_field
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol.wire import TICKET_OPTION, GpuRequest, decode

KEY = "gpushare"
OWN = frozenset((KEY, TICKET_OPTION))
PROJECT_FIELD = "gpushare_project"
SIZE_FIELD = "gpushare_size"  # followed by : and the project
MEMORY_FIELD = "gpushare_memory"
EXACT_MEMORY = "memory"  # value of a size: the amount is in the memory field

_MAX_TEXT = 64
_TICKET_CHARS = 200


def read(user_options: Mapping[str, Any]) -> GpuRequest | None:
    """Return the request for a GPU in a server's options; None if it wants no GPU.

    Raises:
        InvalidRequest: the options are malformed or out of range; the text is for the user.
    """
    given = user_options.get(KEY)
    if given is None or given == {}:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequest(f'the option "{KEY}" is an object like {{"fraction": "0.5"}}')
    # Users may write a number for the fraction; 0.5 means exactly "0.5".
    plain = {
        key: str(value) if key == "fraction" and type(value) in (int, float) else value
        for key, value in given.items()
    }
    request = decode(_json(plain), GpuRequest)
    size = request.size()
    if size is None and request.gpus is None:
        raise InvalidRequest('ask for one of "fraction", "memory", "gpus" and "profile", not for 0 of them')
    project = request.project
    if project is not None and not (0 < len(project) <= _MAX_TEXT and project.isprintable()):
        raise InvalidRequest(f"{project[:40]!r} is not the name of a project")
    return None if size is None else request


def ticket(user_options: Mapping[str, Any]) -> str:
    """Return the broker's ticket from its request to start a job's server; empty if there is none."""
    given = user_options.get(TICKET_OPTION, "")
    return given if isinstance(given, str) and len(given) <= _TICKET_CHARS else ""


def _json(plain: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(plain).encode()
    except (TypeError, ValueError, RecursionError):  # bytes of an uploaded file, for example
        raise InvalidRequest(f'the option "{KEY}" holds more than text and numbers') from None


def size_field(project: str) -> str:
    """Return the name of the form field with the chosen size within a project."""
    return f"{SIZE_FIELD}:{project}"


def memory_field(project: str) -> str:
    """Return the name of the form field with an exact amount of memory within a project."""
    return f"{MEMORY_FIELD}:{project}"


def split_form(form: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (our fields, the site's own fields)."""
    ours = (PROJECT_FIELD, SIZE_FIELD, MEMORY_FIELD)
    mine = {key: value for key, value in form.items() if key.partition(":")[0] in ours}
    return mine, {key: value for key, value in form.items() if key not in mine}


def from_form(fields: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return ``user_options["gpushare"]`` for the choice on the spawn page.

    Raises:
        InvalidRequest: the fields are not from our form.
    """
    project = _text(fields, PROJECT_FIELD)
    chosen = _text(fields, size_field(project))
    if chosen == EXACT_MEMORY:
        amount = _text(fields, memory_field(project))
        options: dict[str, Any] = {"memory": memory_of_field(amount)}
    else:
        options = _card_value(chosen or '{"gpus": 0}')
    if project and options.get("gpus") != 0:
        options["project"] = project
    return options


def _card_value(chosen: str) -> dict[str, Any]:
    try:
        options = json.loads(chosen)
    except (ValueError, RecursionError):
        options = None
    if not isinstance(options, dict):
        raise InvalidRequest(f"{chosen[:40]!r} is not a size; choose one of the cards")
    return options


def _text(fields: Mapping[str, Sequence[Any]], name: str) -> str:
    values = fields.get(name) or [""]
    return values[0] if isinstance(values[0], str) else ""
