"""Work that goes on while nothing can be stored: the disk is full, or the database does not answer.

* On a full disk, what was stored before is carried out; what becomes of it is stored later
  (`carry_out`).  Jobs do not start.  Where a commit hangs, an effect that has not begun waits for it.
* Sessions that are wanted wake (`wake`).  Their resume is the one effect without a stored intent:
  the device helper makes it where no living lease has their part of the devices, writes it down
  first, and refuses what does not fit beside it.  A broker that can store, this or the next, reads it
  from the sample, records it and confirms it (`Effects`).

Nothing else changes, and no request that changes something is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from jupyter_gpushare.backends.base import Devices
from jupyter_gpushare.broker.control.effects import POLL_S, Effects
from jupyter_gpushare.broker.control.error_log import ErrorLog
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, State
from jupyter_gpushare.errors import DeviceError, HelperError
from jupyter_gpushare.protocol.helper import Phase

log = logging.getLogger("gpushare.broker")

# A lease of which the driver has the memory in RAM may be recorded in these states.
_ASLEEP = (State.SUSPENDING, State.SUSPENDED, State.RESUMING)


class Unstored:
    """Wakes sessions while nothing can be stored; on a full disk, also carries out what was stored."""

    def __init__(self, registry: Registry, devices: Devices, effects: Effects) -> None:
        self._registry = registry
        self._devices = devices
        self._effects = effects
        self._errors = ErrorLog()
        self.wakes: dict[str, asyncio.Task[None]] = {}  # by lease; one each

    def carry_out(self, now: float) -> None:
        """Carry out stored suspensions and ends; a session that is wanted is not put to sleep."""
        for record in list(self._registry.index.placed.values()):
            wanted = self._registry.observations[record.id].wanted
            if record.state is State.STOPPING or (record.state is State.SUSPENDING and not wanted):
                self._effects.reconcile(record, now)

    def wake(self) -> None:
        """Resume wanted sessions; waits for no commit."""
        for record in self._wakeable():
            if record.id not in self.wakes:
                name = f"wake {record.handle}"
                self.wakes[record.id] = asyncio.create_task(self._resume(record), name=name)

    async def _resume(self, record: LeaseRecord) -> None:
        what = f"lease={record.handle} wake"
        try:
            moved = await self._devices.resume(record.handle, unrecorded=True)
            if moved.done:
                log.warning("lease=%s resumed without a stored intent", record.handle)
                self._errors.works(what)
            else:
                self._errors.failed(what, HelperError(moved.refused, moved.reason))
        except (HelperError, DeviceError) as error:
            self._errors.failed(what, error)
        except Exception as error:
            self._errors.broke(what, error)
        finally:
            # Not at once again: the sample may be older than the resume.
            await asyncio.sleep(2 * POLL_S)
            del self.wakes[record.id]

    def _wakeable(self) -> list[LeaseRecord]:
        """Return wanted sessions that sleep.

        Those that have a claim: whether their part of the devices is free is for the helper to say.
        One that borrows was promised nothing: its part must be free in the records too.
        """
        registry, held, asleep = self._registry, Counter[str](), list[LeaseRecord]()
        for record in registry.index.placed.values():
            observation = registry.observations[record.id]
            is_parked = observation.sample is not None and observation.sample.phase is Phase.SUSPENDED
            if not record.is_job and record.state in _ASLEEP and is_parked and observation.wanted:
                asleep.append(record)
            elif record.state in (*HOLDS_CAPACITY, State.SUSPENDED):
                held.update(dict.fromkeys(record.lease.devices, record.lease.held_milli))
        found = []
        for record in sorted(asleep, key=lambda each: each.lease.borrowed):
            part = dict.fromkeys(record.lease.devices, record.lease.held_milli)
            if not record.lease.borrowed or all(held[uuid] + part[uuid] <= WHOLE_GPU for uuid in part):
                found.append(record)
            held.update(part)
        return found
