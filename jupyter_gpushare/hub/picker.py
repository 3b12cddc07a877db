"""The size picker of the spawn page: a plain form with the sizes that the broker offers.

The form is a pure function of the broker's offers, and works without JavaScript.  It has
one group of radio buttons per project.  With several projects a select shows the chosen
project's group.  A browser without ``:has`` shows all groups, each under its heading.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jupyter_gpushare import messages
from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.core.size import field_of_memory, parse_fraction
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.hub import options
from jupyter_gpushare.protocol.wire import Offer, Offers

NO_OFFERS = (
    "The GPU service does not answer just now, so sizes cannot be offered. "
    "You can start without GPU, or reload this page in a minute."
)
NOT_SET_UP = (
    "The GPU service of this Hub is not set up correctly, so sizes cannot be offered. "
    "Tell the administrator; the Hub's log says what to change. You can start without GPU."
)
# Keeps the page current, and waits for a size; the page works without it.
_SCRIPT = Path(__file__).with_name("picker.js").read_text(encoding="utf-8")
_NO_GPU: Mapping[str, Any] = {"gpus": 0}
_STARTS = {"now": "starts now", "soon": "starts soon", "no": "cannot start now"}

_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One choice of the spawn page: a size, and when it would start."""

    value: str
    label: str
    detail: str
    starts: str
    promise: str = ""
    reason: str = ""
    disabled: bool = False
    checked: bool
    waits: bool = False  # with JavaScript the page can wait for it


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPlace:
    """The place of a waiting session in the queue; the answer to the page's script."""

    state: Literal["waiting", "ready", "unknown", "refused"]
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of the bar that shows how the machine's GPUs are used."""

    percent: float
    style: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectCards:
    """The choices within one project."""

    project: str
    size_field: str
    memory_field: str
    cards: tuple[Card, ...]
    exact: bool = False  # an exact amount of memory can be requested
    exact_checked: bool = False
    exact_value: str = ""
    segments: tuple[Segment, ...] = ()
    summary: str = ""


def render(
    offers: Sequence[Offers], *, last: Mapping[str, Any], trouble: str = "", place: WaitingPlace | None = None
) -> str:
    """Return the HTML of the picker.

    ``last`` is the user's last choice (as in `options`).  It is preselected if it can start; without one,
    `_first_choice` is.  ``trouble`` is the reason why there are no offers.  ``place`` is the answer to
    the page's script.
    """
    groups = [_group(each, last) for each in offers] or [_bare_group()]
    chosen = last.get("project")
    selected = next((i for i, group in enumerate(groups) if group.project == chosen), 0)
    idle_s = offers[0].idle_timeout_s if offers else 0.0
    return _templates.get_template("picker.html").render(
        groups=groups,
        selected=selected,
        trouble=_sentence(trouble),
        place=place,
        script=_SCRIPT,
        idle=messages.duration(idle_s) if idle_s else "",
        mig=any("profile" in offer.options for each in offers for offer in each.offers),
        project_field=options.PROJECT_FIELD,
        exact_memory=options.EXACT_MEMORY,
    )


def _group(offers: Offers, last: Mapping[str, Any]) -> ProjectCards:
    wanted = _comparable(last) if last else _comparable(_first_choice(offers.offers))
    memory = str(last.get("memory") or "")
    cards = [_card(offer, wanted) for offer in offers.offers]
    exact = any(not card.disabled for card in cards)
    exact_checked = bool(memory) and exact and not any(card.checked for card in cards)
    none = _no_gpu_card(checked=not exact_checked and not any(card.checked for card in cards), jobs=True)
    return ProjectCards(
        project=offers.project,
        size_field=options.size_field(offers.project),
        memory_field=options.memory_field(offers.project),
        cards=(*cards, none),
        exact=exact,
        exact_checked=exact_checked,
        exact_value=field_of_memory(memory),
        segments=_segments(offers),
        summary=_summary(offers),
    )


def _bare_group() -> ProjectCards:
    return ProjectCards(
        project="",
        size_field=options.size_field(""),
        memory_field=options.memory_field(""),
        cards=(_no_gpu_card(checked=True, jobs=False),),
    )


def _no_gpu_card(*, checked: bool, jobs: bool) -> Card:
    return Card(
        value=json.dumps(_NO_GPU),
        label="No GPU",
        detail="For editing and work on the processor"
        + ("; training jobs get GPUs of their own." if jobs else "."),
        starts="starts now",
        checked=checked,
    )


def _sentence(text: str) -> str:
    """Return a reason as a sentence: with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) or not text else ".")


def _comparable(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return a choice in a form in which 0.5 and "1/2" are equal; never fails."""
    found = {key: str(value) for key, value in chosen.items() if key != "project" and value is not None}
    with contextlib.suppress(KeyError, InvalidRequest):
        found["fraction"] = str(parse_fraction(found["fraction"]))
    return found


def _first_choice(offers: Sequence[Offer]) -> Mapping[str, Any]:
    """Return the options to preselect on a first visit.

    These are the largest guaranteed part of a GPU that starts now, else the smallest guaranteed size
    that starts now, else no GPU.
    """
    guaranteed = sorted(
        (offer for offer in offers if offer.guaranteed and offer.starts == "now"),
        key=lambda offer: offer.memory_bytes,
    )
    parts = [offer for offer in guaranteed if "fraction" in offer.options]
    chosen = parts[-1:] or guaranteed[:1]
    return chosen[0].options if chosen else _NO_GPU


def _card(offer: Offer, wanted: Mapping[str, str]) -> Card:
    disabled = offer.starts == "no"
    of = f" of {offer.device}" if offer.device else ""
    memory = " to ".join(messages.gibibytes(n) for n in (offer.memory_bytes, offer.memory_most_bytes) if n)
    promise = "guaranteed" if offer.guaranteed else "may be taken back"
    return Card(
        value=json.dumps({key: value for key, value in offer.options.items() if key != "project"}),
        label=offer.label,
        detail=f"{memory}{of}",
        starts=_STARTS[offer.starts],
        promise="" if disabled else promise,
        reason=_sentence(offer.reason),
        disabled=disabled,
        checked=not disabled and _comparable(offer.options) == wanted,
        waits=disabled and offer.waits,
    )


def _gpus(milli: int) -> str:
    return f"{milli / WHOLE_GPU:g}"


def _segments(offers: Offers) -> tuple[Segment, ...]:
    use, total = offers.use, offers.total_milli
    if total <= 0:
        return ()
    others = max(0, total - offers.free_milli - use.in_use_milli - use.lent_milli)
    parts = (
        (use.in_use_milli, "gpushare-ours", f"{_gpus(use.in_use_milli)} in use by {use.name}"),
        (use.lent_milli, "gpushare-lent", f"{_gpus(use.lent_milli)} of {use.name} lent"),
        (others, "gpushare-others", f"{_gpus(others)} in use by others"),
        (offers.free_milli, "gpushare-free", f"{_gpus(offers.free_milli)} free"),
    )
    return tuple(
        Segment(percent=round(100 * milli / total, 1), style=style, text=text)
        for milli, style, text in parts
        if milli
    )


def _summary(offers: Offers) -> str:
    use = offers.use
    borrowed = f", {_gpus(use.borrowed_milli)} of them borrowed" if use.borrowed_milli else ""
    lent = f"; {_gpus(use.lent_milli)} lent while their owners are idle" if use.lent_milli else ""
    return (
        f"Project {use.name}: {_gpus(use.in_use_milli)} GPUs in use{borrowed}, "
        f"{_gpus(use.quota_milli)} guaranteed{lent}. "
        f"Free on this machine: {_gpus(offers.free_milli)} of {_gpus(offers.total_milli)}."
    )
