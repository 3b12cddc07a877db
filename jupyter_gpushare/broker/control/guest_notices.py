"""What the timeline of a host says of its guests, and what is counted of them when they leave."""

from __future__ import annotations

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import Why
from jupyter_gpushare.messages import HOST_MEMORY_WANTED

_ACTION = "guest"


async def came(registry: Registry, host: LeaseRecord) -> None:
    """Tell the owner of ``host`` that a guest is on one of its devices.

    Raises:
        StoreError: the database failed.
    """
    await registry.record_notice(host, _ACTION, "notice.guest_came")


async def left(
    registry: Registry,
    host: LeaseRecord | None,
    why: str,
    *,
    took_s: float | None = None,
    kept: float | None = None,
) -> None:
    """Count that a guest has left, and tell the owner of its host; None: that has ended.

    ``why``: `HOST_MEMORY_WANTED`, with the seconds that the host waited (``took_s``);
    `Why.PAIR_PARTED`, with the part of its speed that the host kept; or another reason, such as
    "ended" or `Why.CAPACITY_BACK`.

    Raises:
        StoreError: the database failed.
    """
    registry.tally.guests_left[str(why)] += 1
    if host is None:
        return
    if why == HOST_MEMORY_WANTED and took_s is not None:
        waited = messages.text("duration.seconds", f"{took_s:.1f}")
        await registry.record_notice(host, _ACTION, "notice.guest_gave_way", waited)
    elif why == Why.PAIR_PARTED and kept is not None:
        await registry.record_notice(host, _ACTION, "notice.guest_slowed", f"{100 * kept:.0f}")
    else:
        await registry.record_notice(host, _ACTION, "notice.guest_left")
