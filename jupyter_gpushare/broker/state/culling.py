"""What of a site ends sessions that stay idle, asleep or not: cullers of the Hub, and settings of servers.

A culler is a service of the Hub that runs jupyterhub-idle-culler.  Its limits are read from its command,
as the Hub has it; one that a site starts elsewhere is not known.  It goes by the activity that the Hub
has of a server.  Settings of a server are told by the server itself (`wire.KernelActivity.ends_in_s`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

from jupyter_gpushare.backends.base import HubServer, ServerKey
from jupyter_gpushare.wall_clock import before

# The setting of Jupyter Server that ends kernels.
KERNEL_SETTING = "cull_idle_timeout"
_PROGRAMS = frozenset({"jupyterhub_idle_culler", "jupyterhub-idle-culler", "cull_idle_servers.py"})
_LONGEST_S = 1e9  # more is never
_TIMEOUT_S = 600.0  # of a culler whose command has none (jupyterhub-idle-culler 2.0)


class SiteEnd(NamedTuple):
    """The earliest moment at which something of a site may end a session or a kernel of it."""

    at: str  # ISO 8601, UTC; empty: it is not known
    by: str  # a setting, or the service of the Hub
    is_server: bool = True  # else kernels of it
    is_age: bool = False  # used or not


@dataclass(frozen=True, slots=True)
class Culler:
    """A service of the Hub that stops idle servers."""

    service: str
    timeout_s: float | None  # None: its command does not say it
    max_age_s: float = 0.0  # 0: none
    default_servers: bool = True
    named_servers: bool = True

    def ends(self, key: ServerKey, server: HubServer) -> Iterator[SiteEnd]:
        """Yield when it may stop a server of which the Hub knows no later activity."""
        if self.named_servers if key.server else self.default_servers:
            yield SiteEnd(_after(server.last_activity or server.started, self.timeout_s), self.service)
        if self.max_age_s:  # of all servers
            yield SiteEnd(_after(server.started, self.max_age_s), self.service, is_age=True)


def _after(at: str, seconds: float | None) -> str:
    try:
        return before(at, seconds=-seconds) if at and seconds is not None else ""
    except OverflowError:
        return ""


def culler_of(service: str, command: str | Sequence[str]) -> Culler | None:
    """Return the culler that a service of the Hub with this command is; None: it is none."""
    command = [command] if isinstance(command, str) else command
    words = [word for each in command for word in _words(str(each))]
    if not any(PurePath(word.removeprefix("-m")).name in _PROGRAMS for word in words):
        return None
    given = dict(_options(words))
    in_file = None if {"config", "config-file"} & given.keys() else _TIMEOUT_S
    return Culler(
        service,
        _number(given, "timeout", in_file),
        _number(given, "max-age", 0.0) or 0.0,
        _is_on(given, "cull-default-servers"),
        _is_on(given, "cull-named-servers"),
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text) if len(text.split()) > 1 else [text]
    except ValueError:
        return text.split()


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield options of a command: ``--timeout=60``, ``--timeout 60``, ``--IdleCuller.timeout=60``."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            yield (
                name.removeprefix("IdleCuller.").replace("_", "-"),
                value if equals else following,
            )


def _number(given: Mapping[str, str], name: str, otherwise: float | None) -> float | None:
    """Return seconds; None: what is given is no number, such as a variable of a shell."""
    if name not in given:
        return otherwise
    try:
        seconds = float(given[name])
    except ValueError:
        return None
    return min(max(0.0, seconds), _LONGEST_S) if not math.isnan(seconds) else None


def _is_on(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "true").lower() not in ("false", "0")


@dataclass(slots=True)
class Culling:
    """The cullers of the Hub, and what they go by of the servers with a lease; not stored."""

    cullers: tuple[Culler, ...] = ()
    servers: Mapping[ServerKey, HubServer] = field(default_factory=dict)

    def saw(self, servers: Mapping[ServerKey, HubServer], leased: Iterable[ServerKey]) -> None:
        """Take in the Hub's servers; of one that stops or has gone, what the Hub said before counts."""
        known = dict[ServerKey, HubServer]()
        for key in leased:
            now, earlier = servers.get(key), self.servers.get(key)
            if (server := earlier if now is None or (now.stops and earlier) else now) is not None:
                known[key] = server
        self.servers = known

    def end(self, key: ServerKey) -> SiteEnd | None:
        """Return when a culler of the Hub may stop a server; None: none does."""
        server = self.servers.get(key, HubServer())
        ends = [end for culler in self.cullers for end in culler.ends(key, server)]
        return min(ends, key=lambda end: end.at or "~", default=None)
