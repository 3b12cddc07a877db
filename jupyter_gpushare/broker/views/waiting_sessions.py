"""Sessions that wait for their start, as the spawn page and the lists of the queue show them."""

from __future__ import annotations

from collections.abc import Iterator

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control.forecast import seconds
from jupyter_gpushare.broker.engine import Estimate
from jupyter_gpushare.broker.state.session_queue import Place
from jupyter_gpushare.broker.views.views import NOT_FOR_FREE, Views
from jupyter_gpushare.core.model import Why
from jupyter_gpushare.core.order import gpus
from jupyter_gpushare.protocol import wire


def spawn_wait(views: Views, place: Place) -> wire.SpawnWait:
    """Return what the spawn page says about a place."""
    if place.grant is not None:
        left_s = place.ends_at() - views.registry.clock()
        size, left = messages.size_text(place.lease.size), messages.duration_text(left_s)
        sentence = messages.text("spawn.reserved", size, left)
        return wire.SpawnWait(state="ready", sentence=messages.english(sentence))
    _, position, estimate = next(each for each in _waiting(views) if each[0].lease.id == place.lease.id)
    return wire.SpawnWait(
        state="waiting",
        sentence=messages.english(_sentence(views, place, position, estimate)),
        position=position,
        starts_in=seconds(estimate),
    )


def waiting_sessions(views: Views, user: str | None) -> list[wire.WaitingSession]:
    """Return the sessions of a user that wait, the first to start first; of all users for None."""
    found: list[wire.WaitingSession] = []
    if user is not None and all(each.lease.user != user for each in views.registry.session_queue.waiting()):
        return found
    for place, position, estimate in _waiting(views):
        lease = place.lease
        if user is None or lease.user == user:
            found.append(
                wire.WaitingSession(
                    user=lease.user,
                    server=lease.server,
                    project=lease.project,
                    size=lease.size.text,
                    position=position,
                    sentence_texts=list(_sentence(views, place, position, estimate)),
                    starts_in=seconds(estimate),
                )
            )
    return found


def _waiting(views: Views) -> Iterator[tuple[Place, int, Estimate | None]]:
    """Yield waiting places with their positions, and when they start where that is known well enough.

    A place starts when what it and those before it ask for is free at once, unless that is not
    what it waits for.
    """
    wanted = 0.0
    outlook = views.cluster_views.now().outlook
    for position, place in enumerate(views.registry.session_queue.waiting(), 1):
        wanted += gpus(place.lease)
        is_for_free = outlook.why.get(place.lease.id) not in NOT_FOR_FREE
        yield place, position, views.forecast.free(wanted) if is_for_free else None


def _sentence(views: Views, place: Place, position: int, estimate: Estimate | None) -> messages.Texts:
    explanation = views.cluster_views.now().outlook.explain(place.lease.id)
    sentence = messages.waiting(
        "" if explanation.why is Why.NOT_WAITING else explanation.why,
        needs=messages.needs_of(place.lease),
        free_milli=explanation.free_milli,
        position=position,
    )
    if estimate is not None:
        sentence += (messages.text("job.starts_in", messages.range_text(estimate.low_s, estimate.high_s)),)
    return sentence
