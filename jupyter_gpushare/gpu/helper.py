"""The device helper: one process per GPU machine, the only one that touches the driver.

Started by ``gpushare helper`` or ``python -m jupyter_gpushare.gpu.helper``.  It
outlives the broker.  When it ends, suspended leases stay suspended, limit pages
stay in force, and the next helper takes both over from the state directory.

Verbs that change something carry the broker's epoch (`verbs`).  The epoch is on
disk before the effect, and compared again once the lease is held, so that a
request of an old broker that waited its turn does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import GpuShareError, HelperError, InvalidRequest
from . import verbs
from .canary import Canary
from .cgroups import Cgroups
from .checkpoint import Checkpoint
from .events import Events
from .examiner import Examiner
from .health import Health
from .host import HostMemory
from .isolation import check_lease
from .journal import StateDirectory
from .ladder import reserve_bytes
from .lease import Lease
from .leases import LeaseBook
from .nvml import Gpu, Nvml
from .processes import Processes, boot_id, leader
from .sampler import Sampler
from .server import Server
from .suspend import Mover
from .verbs import Device, ErrorKind, Level, WatchdogAction
from .wake import Waker
from .watchdog import Watchdog

log = logging.getLogger(__name__)

# How long `inventory` waits for the self-tests that run at start; a `DEVICE` event follows a later end.
CANARY_WAIT_S = 4.0
# How long a stop waits for a move that is under way.
STOP_WAIT_S = 5.0
STOP_LIMIT_S = 2.0
# An answer to a move says what is true already; the sample follows within this.
REFRESH_WAIT_S = 0.3
SIGNAL_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a helper is started."""

    state_dir: Path
    socket: Path
    allow_uids: frozenset[int] = frozenset()
    watchdog: WatchdogAction = WatchdogAction.WARN
    host_budget_percent: int = 50
    cgroup_root: Path | None = None
    sample_s: float = 1.0


class Helper:
    """All parts of the helper, wired together; `start` makes them run."""

    def __init__(self, options: Options, step: Callable[[str], None] = lambda name: None) -> None:
        """Open the driver and take over what an earlier helper left.

        Raises:
            GpuShareError: there is no driver, or another helper runs here.
        """
        self._options = options
        self._boot_id = boot_id()
        self._state = StateDirectory(options.state_dir)
        self._nvml = Nvml()
        self._checkpoint = Checkpoint()
        self._simulated = self._checkpoint.simulated_host_memory() is not None
        self._host = HostMemory(options.host_budget_percent, self._checkpoint.simulated_host_memory)
        self._processes = Processes(self._state.leases)
        self._events = Events()
        self._cgroups = Cgroups(options.cgroup_root, self._nvml, self._processes.alive)
        self._book = LeaseBook(
            self._state,
            self._nvml,
            self._processes,
            self._boot_id,
            self._cgroups,
            lambda uuid: self._examiner.offers(uuid, Level.CGROUP),
        )
        self._health = Health(self._nvml, self._events, self._book.all)
        self._watchdog = Watchdog(options.watchdog, self._processes, self._events)
        self._examiner = Examiner(
            canary=Canary(
                self._nvml, self._checkpoint, self._cgroups, self._state.leases, self._watchdog.own.add
            ),
            nvml=self._nvml,
            health=self._health,
            events=self._events,
            state=self._state,
            key=f"{self._boot_id} {self._nvml.driver} {self._simulated}",
            enforce=self._enforce,
        )
        self._waker = Waker(self._book.all, self._events)
        self._mover = Mover(
            nvml=self._nvml,
            checkpoint=self._checkpoint,
            processes=self._processes,
            state=self._state,
            host=self._host,
            events=self._events,
            boot_id=self._boot_id,
            hindrance=self._examiner.hindrance,
            out_of_service=self._health.reason,
            on_driver_error=self._examiner.doubt,
            margin_bytes=self._examiner.margin_bytes,
            leases=self._book.all,
            on_suspended=self._waker.kick,
            on_phase=self._cgroups.follow,
            step=step,
        )
        self._sampler = Sampler(
            nvml=self._nvml,
            processes=self._processes,
            mover=self._mover,
            host=self._host,
            watchdog=self._watchdog,
            health=self._health,
            place=self._cgroups.place,
            level=self._examiner.level_of,
            events=self._events,
            leases=self._book.all,
            period_s=options.sample_s,
        )
        self._book.on_suspended = self._waker.kick
        self._book.adopt(self._mover.settle)
        self._server = Server(options.socket, options.allow_uids, self._handle, self._events)

    def start(self) -> None:
        """Measure once, then serve in threads."""
        self._sampler.measure()
        for run in (
            self._sampler.run,
            self._sampler.run_exits,
            self._sampler.run_settle,
            self._health.run,
            self._waker.run,
            self._server.run,
            self._examiner.run,
        ):
            threading.Thread(target=run, name=run.__qualname__, daemon=True).start()
        self._waker.kick()
        log.info(
            "helper version=%s driver=%s devices=%d leases=%d epoch=%d socket=%s simulated=%s",
            __version__, self._nvml.driver, len(self._nvml.gpus), len(self._book.all()),
            self._state.epoch, self._options.socket, self._simulated,
        )  # fmt: skip

    def stop(self) -> None:
        """Stop serving; suspended leases stay suspended, lease files stay in place."""
        self._examiner.stop()
        self._health.stop()
        self._server.stop()
        self._events.close()
        self._waker.stop()
        self._sampler.stop()
        for lease in self._book.all():
            # A move under way is written down step by step; give it a moment to end.
            if lease.moving.acquire(timeout=STOP_WAIT_S):
                lease.files.close()
        self._processes.close()
        self._state.close()

    # Requests

    def _handle(self, verb: str, fields: dict[str, Any]) -> Any:
        epoch = fields.pop("epoch", None)
        if epoch is not None and (type(epoch) is not int or not 0 <= epoch < 1 << 63):
            raise InvalidRequest("an epoch is a whole number of at least 0")
        readers: dict[str, Callable[[], Any]] = {
            "hello": self._hello,
            "inventory": self._inventory,
            "sample": self._sampler.sample,
            "watch": self._sampler.sample,
        }
        changers: dict[str, tuple[type[Any], Callable[[Any, int], Any]]] = {
            "set_limit": (verbs.SetLimit, self._book.set_limit),
            "suspend": (verbs.Suspend, self._suspend),
            "resume": (verbs.Resume, self._resume),
            "signal": (verbs.Signal, self._signal),
            "drop": (verbs.Drop, self._book.drop),
        }
        if verb in readers:
            if fields:
                raise InvalidRequest(f"{verb} takes no field {next(iter(fields))[:40]!r}")
            if epoch is not None:
                self._book.fence(epoch)
            return readers[verb]()
        if verb not in changers:
            raise HelperError(ErrorKind.UNKNOWN_VERB, f"no verb {verb[:40]!r}")
        cls, change = changers[verb]
        request = verbs.build(cls, fields)
        check_lease(request.lease)
        if epoch is None:
            raise InvalidRequest(f"{verb} needs the epoch")
        self._book.fence(epoch)
        return change(request, epoch)

    def _hello(self) -> verbs.Hello:
        return verbs.Hello(
            version=__version__,
            pid=os.getpid(),
            boot_id=self._boot_id,
            epoch=self._state.epoch,
            simulated=self._simulated,
        )

    def _inventory(self) -> verbs.Inventory:
        self._examiner.wait_first(CANARY_WAIT_S)
        return verbs.Inventory(
            host=socket.gethostname(),
            driver=self._nvml.driver,
            simulated=self._simulated,
            devices=tuple(self._device(gpu) for gpu in self._nvml.gpus),
            host_total_bytes=self._host.total_bytes(),
            host_budget_bytes=self._host.budget_bytes(),
            at=time.monotonic(),
            watchdog=self._options.watchdog,
        )

    def _device(self, gpu: Gpu) -> Device:
        reason = self._health.reason(gpu.uuid)
        verdict = self._examiner.verdict(gpu.uuid)
        return Device(
            uuid=gpu.uuid,
            index=gpu.index,
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            reserve_bytes=reserve_bytes(gpu),
            healthy=not reason,
            reason=reason,
            level=verdict.level if verdict else Level.HINTS,
            ladder=verdict.ladder if verdict else (),
            profile=gpu.profile,
            suspendable=verdict.suspendable if verdict else False,
            suspend_reason=self._examiner.hindrance(gpu.uuid),
            suspend_bytes_per_s=verdict.suspend_bytes_per_s if verdict else 0,
            resume_bytes_per_s=verdict.resume_bytes_per_s if verdict else 0,
            island=gpu.island,
        )

    def _enforce(self, uuid: str) -> None:
        """Leases that were made before it was known that the driver can limit them."""
        for lease in self._book.all():
            if uuid in lease.limits and not lease.in_cgroup:
                self._book.enforce(lease)

    def _suspend(self, request: verbs.Suspend, epoch: int) -> verbs.Moved:
        if not 0 < request.timeout_s <= 600:
            raise InvalidRequest("timeout_s is more than 0 and at most 600 seconds")
        return self._move(
            request.lease,
            epoch,
            lambda lease: self._mover.suspend(
                lease, request.calls, request.timeout_s, keep_memory=request.keep_memory
            ),
        )

    def _resume(self, request: verbs.Resume, epoch: int) -> verbs.Moved:
        if not 0 <= request.timeout_s <= 3600:
            raise InvalidRequest("timeout_s is at least 0 and at most 3600 seconds")
        return self._move(request.lease, epoch, lambda lease: self._mover.resume(lease, request.timeout_s))

    def _move(self, name: str, epoch: int, move: Callable[[Lease], verbs.Moved]) -> verbs.Moved:
        lease = self._book.get(name)
        if lease is None:
            return verbs.Moved(
                done=False, refused=verbs.Refusal.NO_LEASE, reason=f"no lease {name} on this machine"
            )
        try:
            with self._book.turn(lease, epoch):
                moved = move(lease)
        except HelperError as error:
            if error.kind != ErrorKind.BUSY:
                raise
            return verbs.Moved(done=False, refused=verbs.Refusal.BUSY, reason=str(error))
        if not moved.done:
            log.info("lease=%s stays %s refused=%s reason=%s", name, lease.phase, moved.refused, moved.reason)
        self._sampler.refresh(REFRESH_WAIT_S)
        return moved

    def _signal(self, request: verbs.Signal, epoch: int) -> verbs.Signalled:
        if request.to not in ("leader", "all"):
            raise InvalidRequest("a signal goes to 'leader' or 'all'")
        try:
            number = signal.Signals(request.number)
        except ValueError:
            raise InvalidRequest(f"no signal {request.number}") from None
        if self._book.get(request.lease) is None:
            raise HelperError(ErrorKind.UNKNOWN_LEASE, f"no lease {request.lease} on this machine")
        sent: set[tuple[int, int]] = set()
        # A process that forks while it is signalled leaves a child for the next round.
        for _ in range(SIGNAL_ROUNDS if request.to == "all" else 1):
            targets = self._book.living(request.lease)
            if request.to == "leader":
                first = leader(targets)
                targets = (first,) if first else ()
            new = [each.key for each in targets if each.key not in sent]
            if not new:
                break
            sent.update(key for key in new if self._processes.signal(key, number))
        log.info("lease=%s signal=%s to=%s processes=%d", request.lease, number.name, request.to, len(sent))
        return verbs.Signalled(count=len(sent))


EXAMPLES = """\
examples:
  gpushare helper --state-dir /var/lib/gpushare --socket /run/gpushare/helper.sock --allow-uid 985
      as root, for a broker that runs as uid 985
  gpushare helper --state-dir ./state --socket ./state/helper.sock
      as yourself, for a broker and servers of the same user

The state directory must outlive the helper (not /tmp), and the users of the
servers must be able to pass through it: they open their own limit page in it.
"""


def parse(argv: Sequence[str]) -> Options:
    """The options on a command line; exits with 2 and a usage line when they are wrong."""
    parser = argparse.ArgumentParser(
        prog="gpushare helper",
        description="Runs beside the NVIDIA driver: inventory, samples, limits, suspend and resume.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--state-dir", type=Path, required=True, help="limit pages, accounts and the journal")
    parser.add_argument("--socket", type=Path, help="where to listen (default: STATE_DIR/helper.sock)")
    parser.add_argument(
        "--allow-uid", type=int, action="append", default=[], metavar="UID",
        help="also answer this user; root and the helper's own user always may (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--watchdog", type=WatchdogAction, choices=list(WatchdogAction), default=WatchdogAction.WARN,
        help="about processes beyond their limit or without a lease: tell, also stop them, or do not look",
    )  # fmt: skip
    parser.add_argument(
        "--host-budget-percent", type=int, default=50, metavar="PERCENT",
        help="how much of the host's memory suspended leases may take together (default 50)",
    )  # fmt: skip
    parser.add_argument(
        "--cgroup-root", type=Path, metavar="PATH",
        help="a cgroup (v2) below which the helper makes one per lease: for drivers that limit them (r615)",
    )  # fmt: skip
    parser.add_argument(
        "--sample-s", type=float, default=1.0, metavar="SECONDS", help="time between samples (default 1)"
    )
    given = parser.parse_args(argv)
    if not 1 <= given.host_budget_percent <= 95:
        parser.error("--host-budget-percent is 1 to 95")
    if not 0.05 <= given.sample_s <= 10:
        parser.error("--sample-s is 0.05 to 10 seconds: an end must be seen within 2 s, mostly")
    if any(uid < 0 for uid in given.allow_uid):
        parser.error("--allow-uid is a user's number")
    state_dir = given.state_dir.absolute()
    return Options(
        state_dir=state_dir,
        socket=(given.socket or state_dir / "helper.sock").absolute(),
        allow_uids=frozenset(given.allow_uid),
        watchdog=given.watchdog,
        host_budget_percent=given.host_budget_percent,
        cgroup_root=given.cgroup_root.absolute() if given.cgroup_root else None,
        sample_s=given.sample_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the helper until SIGTERM or SIGINT; 0 after a clean stop, 1 with a reason otherwise."""
    options = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr
    )
    told_to_end, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    # Whichever thread the kernel hands a signal to, its number lands in the pipe.
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    _raise_descriptors()
    try:
        helper = Helper(options)
    except GpuShareError as error:
        print(f"gpushare helper: {error}", file=sys.stderr)
        return 1
    helper.start()
    os.read(told_to_end, 1)
    # A kill at any step loses nothing, so whatever hangs is not waited for longer than this.
    limit = threading.Timer(STOP_LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    helper.stop()
    log.info("helper stopped")
    # Threads that hang in the driver must not keep the process.
    sys.stderr.flush()
    os._exit(0)


def _raise_descriptors() -> None:
    """One pidfd per process of a lease: take what the hard limit gives."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
