"""Processes without a lease: what the device helper shows of them, and the request to end one.

A request names a process as the sample did, by pid and start time.  The helper compares that with
what it finds itself: it ends only a process that has no lease then.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnleasedProcess:
    """A process without a lease that uses a device."""

    process: str  # names it in `EndProcess`
    pid: int
    uid: int
    name: str  # as the process chose it
    used_bytes: int  # on this device; 0 where the driver does not say
    kept: str  # why it is not ended on request; empty: it may be
    ending: bool = False  # it was told to end


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcess:
    """End a process without a lease: SIGTERM, and SIGKILL after 5 s if it is still there without one."""

    device: str  # UUID
    process: str
