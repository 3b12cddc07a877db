"""Messages of the Hub's spawner: GPU requests, grants, and the offers of the spawn page."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec

from jupyter_gpushare.core.model import WHOLE_GPU, Kind
from jupyter_gpushare.core.size import MAX_GPUS, Size, parse_fraction
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol.wire.codec import Answer, Message
from jupyter_gpushare.protocol.wire.jobs import JobOutlook, JobSpec
from jupyter_gpushare.protocol.wire.status import ProjectUse


class GpuRequest(Message, frozen=True):
    """``user_options["gpushare"]``: exactly one of the four sizes."""

    fraction: str | None = None  # "0.5", "1/2"
    memory: str | None = None  # "20GiB", of one device
    gpus: int | None = None  # whole GPUs together; 0: none
    profile: str | None = None  # "1g.10gb": one MIG instance
    project: str | None = None

    def size(self) -> Size | None:
        """Return the requested size; None for no GPU.

        Raises:
            InvalidRequest: several sizes are given, or one cannot be parsed.
        """
        given = [
            name for name in ("fraction", "memory", "gpus", "profile") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise InvalidRequest(
                'ask for one of "fraction", "memory", "gpus" and "profile", not for %1 of them', len(given)
            )
        if self.fraction is not None:
            return Size(parse_fraction(self.fraction))
        if self.memory is not None:
            return Size.of_memory(self.memory)
        if self.profile is not None:
            return Size.of_profile(self.profile)
        count = self.gpus or 0
        if not 0 <= count <= MAX_GPUS:
            raise InvalidRequest(
                "%1 is not a number of GPUs: ask for a whole number from 0 to %2", count, MAX_GPUS
            )
        return Size(WHOLE_GPU, count) if count else None


class SpawnRequest(Message, frozen=True):
    """From the spawner: this server is about to start."""

    user: str
    server: str  # "" is the default server
    groups: list[str]
    uid: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 2)]  # of the server's processes
    options: GpuRequest | None = None
    created: datetime | None = None  # when the Hub made the user; None: not known
    own_uid: bool = False  # ``uid`` belongs to a system user, who is this user alone
    admin: bool = False
    not_nodes: list[str] = []  # on a cluster: nodes without capacity for the server itself
    may_gain: bool = False  # without a GPU, it can get one while it runs: its processes run beside the broker
    sees_all_gpus: bool = False  # its processes can open the device files of all GPUs of the machine
    ticket: str = ""  # for a job's server: the ticket in the broker's request to start it
    # Seconds that the spawner waits for the answer; None: not known.
    patience_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None


class SpawnStop(Message, frozen=True, omit_defaults=True):
    """From the spawner: this server has ended."""

    user: str
    server: str
    created: datetime | None = None  # as in `SpawnRequest`
    not_nodes: list[str] = []  # as in `SpawnRequest`: for the next try of a job
    # Whether the Hub stopped it, or it ended by itself; None: not known.
    by_hub: bool | None = None


class SpawnProgress(Answer, frozen=True):
    """Answer to ``GET spawner/start``: the progress of a server's start."""

    message: str  # a sentence, or empty


# An option of a job's server at the Hub.
TICKET_OPTION = "gpushare_start"

# Reasons of a refusal (`ErrorAnswer.reason`) of the Hub itself, not of a user's request.
NOT_THE_SPAWNER = "not_the_spawner"  # the token is not the spawner's
UNVERIFIED_CHANNEL = "unverified_channel"


class SpawnFault(Message, frozen=True):
    """From the Hub: why its spawner can start no server with a GPU; an administrator must fix it."""

    message: str


class HostMount(Answer, frozen=True):
    """A path of a node that is mounted at the same path."""

    path: str
    read_only: bool = True


class SpawnGrant(Answer, frozen=True):
    """Answer to a `SpawnRequest`; ``lease`` is None for a server without GPU.

    If such a server may get a GPU while it runs, ``env`` names the lease that it gets then.
    """

    lease: str | None
    kind: Kind
    env: dict[str, str]  # complete values, except LD_PRELOAD, which is prepended
    devices: list[str] = []
    memory_limit_bytes: int = 0
    asleep: bool = False  # starts suspended: its GPU is lent, and resumes with the first GPU cell
    borrowed: bool = False  # over quota: may be suspended
    message: str = ""  # for the progress page
    node: str = ""  # of a cluster: where the server must run
    mounts: list[HostMount] = []  # of a cluster: what the server needs of that node
    job: JobSpec | None = None


class SpawnWait(Answer, frozen=True):
    """Answer to ``POST spawner/wait``: the place of a session that waits for its start."""

    state: Literal["waiting", "ready"]  # ready: its GPUs are reserved until the server starts, for a while
    sentence: str
    position: int | None = None  # among the sessions that wait, 1 is next


class Offer(Answer, frozen=True):
    """One size on the spawn page or for a job."""

    label: str  # "1/2 GPU"
    options: dict[str, str | int]  # value of user_options["gpushare"]
    memory_bytes: int  # all devices together; the minimum while several models are possible
    starts: Literal["now", "soon", "no"]
    guaranteed: bool
    reason: str = ""  # why it cannot start or is not guaranteed: a sentence
    device: str = ""  # "H100-80GB"; "A100-40GB or H100-80GB" while either may be it
    memory_most_bytes: int | None = None  # the maximum; None: it is `memory_bytes`
    waits: bool = False  # a session can wait for it


class Offers(Answer, frozen=True):
    """Answer to ``GET offers``: what each size would get now."""

    project: str
    projects: list[str]  # the user's own
    offers: list[Offer]
    use: ProjectUse
    free_milli: int
    total_milli: int
    idle_timeout_s: float
    job: JobOutlook | None = None  # for the size in the query
    shares: bool = False  # jobs may share a GPU here, where their owners agree
