"""What may be asked for here: of which project, in which size, and whether the devices are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jupyter_gpushare import wire, words
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.loop import STALE_S
from jupyter_gpushare.broker.policy import gpus_to_milli, parse_memory, parse_profile
from jupyter_gpushare.broker.records import ProjectOverride
from jupyter_gpushare.core.explain import Size
from jupyter_gpushare.core.model import WHOLE_GPU, parse_fraction
from jupyter_gpushare.errors import Conflict, InvalidRequest, NotAllowed, NotFound

# How long a request waits for the first measurement of a broker that has just started.
_FIRST_LOOK_S = 3.0


class Terms:
    """Checks of requests; and of changes to the numbers of a project."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def choose_project(self, groups: Sequence[str], wanted: str | None) -> str:
        """Return the project a request counts towards.

        Raises:
            NotFound: there is no such project, or it is not the user's.
            NotAllowed: the user belongs to no project.
        """
        mine = self.book.policy.projects_of(groups)
        if wanted is not None:
            if wanted not in mine:
                yours = f"yours: {', '.join(mine)}" if mine else "you belong to none"
                raise NotFound(
                    f"there is no project {wanted[:60]!r} for you; {yours}", reason="unknown_project"
                )
            return wanted
        if not mine:
            raise NotAllowed("you belong to no project that may use GPUs: ask the admin of this Hub")
        return mine[0]

    def size_of(self, request: wire.GpuRequest) -> Size | None:
        """Return what a session asks for; None: no GPU.

        Raises:
            InvalidRequest: no size, several, or one that cannot be.
        """
        sizes = (request.fraction, request.memory, request.gpus, request.profile)
        if sum(x is not None for x in sizes) > 1:
            raise InvalidRequest("give one of fraction, memory, gpus and profile, not several")
        if request.fraction is not None:
            return Size(fraction_milli=parse_fraction(request.fraction))
        if request.memory is not None:
            return Size(memory_bytes=parse_memory(request.memory))
        if request.profile is not None:
            return Size(fraction_milli=WHOLE_GPU, profile=parse_profile(request.profile))
        count = request.gpus or 0
        if not 0 <= count <= 1024:
            raise InvalidRequest(f"gpus is a whole number from 0 to 1024, not {count}")
        return Size(fraction_milli=WHOLE_GPU, device_count=count) if count else None

    def check_share(self, size: Size) -> None:
        """Refuse parts so small that a machine's places go to a few people.

        Raises:
            InvalidRequest: less than the site gives out.
        """
        least = self.book.policy.min_fraction_milli
        if size.memory_bytes:
            smallest = min((d.grantable_bytes for d in snapshot.devices(self.book)), default=0)
            least_bytes = smallest * least // WHOLE_GPU
            if size.memory_bytes < least_bytes:
                raise InvalidRequest(
                    f"ask for at least {words.gigabytes(least_bytes)}: less is not given out here"
                )
        elif size.fraction_milli < least:
            raise InvalidRequest(f"ask for at least {least / WHOLE_GPU:g} GPU: less is not given out here")

    async def known(self) -> None:
        """Return when the devices are known: a broker that has just started measures first."""
        if self.book.inventory is None:
            await self.book.wait_beyond(self.book.seq, _FIRST_LOOK_S)
        if self.book.inventory is None or self.book.clock() - self.book.sampled_at > STALE_S:
            raise Conflict(
                "the GPUs of this machine cannot be reached just now; a server without GPU starts anyway",
                reason="devices_unknown",
            )

    async def change_project(self, name: str, change: wire.ProjectChange) -> None:
        """Override the configured numbers of a project.

        Raises:
            NotFound: no such project.
            InvalidRequest: a value is out of range.
        """
        if self.book.policy.project_config(name) is None:
            raise NotFound(f"there is no project {name[:60]!r}")
        old = self.book.overrides.get(name, ProjectOverride(name=name))
        if change.weight is not None and not 0 <= change.weight <= 1000:
            raise InvalidRequest(f"weight is a whole number from 0 to 1000, not {change.weight}")
        await self.book.put_override(
            replace(
                old,
                quota_milli=old.quota_milli if change.quota is None else gpus_to_milli(change.quota, "quota"),
                weight=old.weight if change.weight is None else change.weight,
                limit_milli=old.limit_milli if change.limit is None else gpus_to_milli(change.limit, "limit"),
            )
        )
