"""Mechanisms of a site that end idle sessions, suspended or not: cullers of the Hub, settings of servers.

A culler is a service of the Hub that runs jupyterhub-idle-culler.  Its limits are read from its command in
the Hub's configuration; a culler that the site starts elsewhere is unknown.  A culler judges a server by
the activity that the Hub recorded.  A server reports its own settings (`wire.KernelActivity.ends_in_s`).
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
_MAX_S = 1e9  # a longer time means never
_TIMEOUT_S = 600.0  # default of jupyterhub-idle-culler 2.0


class SiteEnd(NamedTuple):
    """The earliest time at which a site's culler or setting may end a session or a kernel of it."""

    at: str  # ISO 8601, UTC; empty: unknown
    by: str  # a setting, or the service of the Hub
    is_server: bool = True  # False: it ends kernels only
    is_age: bool = False  # True: it ends servers by age, even while in use


@dataclass(frozen=True, slots=True)
class Culler:
    """A service of the Hub that stops idle servers."""

    service: str
    timeout_s: float | None  # None: its command does not tell
    max_age_s: float = 0.0  # 0: none
    default_servers: bool = True
    named_servers: bool = True

    def ends(self, key: ServerKey, server: HubServer) -> Iterator[SiteEnd]:
        """Yield the times at which it may stop a server, if the Hub sees no further activity."""
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
    """Return the culler that a service of the Hub runs with this command, or None if it runs none."""
    command = [command] if isinstance(command, str) else command
    words = [word for each in command for word in _words(str(each))]
    if not any(PurePath(word.removeprefix("-m")).name in _PROGRAMS for word in words):
        return None
    options = dict(_options(words))
    in_file = None if {"config", "config-file"} & options.keys() else _TIMEOUT_S
    return Culler(
        service,
        _number(options, "timeout", in_file),
        _number(options, "max-age", 0.0) or 0.0,
        _is_on(options, "cull-default-servers"),
        _is_on(options, "cull-named-servers"),
    )


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text) if len(text.split()) > 1 else [text]
    except ValueError:
        return text.split()


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command: ``--timeout=60``, ``--timeout 60``, ``--IdleCuller.timeout=60``."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            yield (
                name.removeprefix("IdleCuller.").replace("_", "-"),
                value if equals else following,
            )


def _number(options: Mapping[str, str], name: str, default: float | None) -> float | None:
    """Return the seconds of an option, or None if its value is no number, such as a shell variable."""
    if name not in options:
        return default
    try:
        seconds = float(options[name])
    except ValueError:
        return None
    return min(max(0.0, seconds), _MAX_S) if not math.isnan(seconds) else None


def _is_on(options: Mapping[str, str], name: str) -> bool:
    return options.get(name, "true").lower() not in ("false", "0")


@dataclass(slots=True)
class Culling:
    """The cullers of the Hub, and the state of servers with a lease that they use; not stored."""

    cullers: tuple[Culler, ...] = ()
    servers: Mapping[ServerKey, HubServer] = field(default_factory=dict)

    def saw(self, servers: Mapping[ServerKey, HubServer], leased: Iterable[ServerKey]) -> None:
        """Store the Hub's servers; keep the earlier state of a server that is stopping or gone."""
        known = dict[ServerKey, HubServer]()
        for key in leased:
            now, earlier = servers.get(key), self.servers.get(key)
            if (server := earlier if now is None or (now.stops and earlier) else now) is not None:
                known[key] = server
        self.servers = known

    def end(self, key: ServerKey) -> SiteEnd | None:
        """Return when a culler of the Hub may stop a server, or None if none does."""
        server = self.servers.get(key, HubServer())
        ends = [end for culler in self.cullers for end in culler.ends(key, server)]
        return min(ends, key=lambda end: end.at or "~", default=None)
