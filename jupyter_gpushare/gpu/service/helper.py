"""The device helper: one process per GPU machine, the only one that touches the driver.

Started by ``gpushare helper`` or ``python -m jupyter_gpushare.gpu.service.helper``.  It
outlives the broker.  When it ends, suspended leases stay suspended, limit pages
stay in force, and the next helper takes both over from the state directory.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_gpushare import __version__, notify
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.gpu.checks.canary import Canary
from jupyter_gpushare.gpu.checks.health import Health
from jupyter_gpushare.gpu.checks.self_tests import SelfTests
from jupyter_gpushare.gpu.checks.unleased import StopRules, UnleasedProcesses
from jupyter_gpushare.gpu.checks.watchdog import Watchdog
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.driver.nvml import Nvml
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.cgroups import Cgroups
from jupyter_gpushare.gpu.leases.device_files import DeviceFiles
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.host import HostMemory
from jupyter_gpushare.gpu.leases.journal import StateDirectory
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.processes import Processes
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.suspend import Mover
from jupyter_gpushare.gpu.moves.unattended import UnattendedResumes
from jupyter_gpushare.gpu.moves.wake import WakeDetector
from jupyter_gpushare.gpu.service.requests import Requests
from jupyter_gpushare.gpu.service.sampler import Sampler
from jupyter_gpushare.gpu.service.server import Server
from jupyter_gpushare.procfs import boot_id
from jupyter_gpushare.protocol.helper import WatchdogAction

log = logging.getLogger(__name__)

# How long a stop waits for a move in progress.
STOP_WAIT_S = 5.0
STOP_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a helper is started."""

    state_dir: Path
    socket: Path
    lease_dir: Path | None = None
    allow_uids: frozenset[int] = frozenset()
    watchdog: WatchdogAction = WatchdogAction.WARN
    unleased: StopRules = field(default_factory=StopRules)
    host_budget_percent: int = 50
    cgroup_root: Path | None = None
    own_device_files: bool = False
    device_dir: Path | None = None  # None: /dev; of the simulated driver: there are none
    park_before_kill: bool = False
    sample_s: float = 1.0


class Helper:
    """All parts of the helper, wired together; `start` makes them run."""

    def __init__(self, options: Options) -> None:
        """Open the driver and take over what an earlier helper left.

        Raises:
            GpuShareError: there is no driver, or another helper runs here.
        """
        self._options = options
        state = StateDirectory(options.state_dir, boot_id(), options.lease_dir)
        checkpoint, nvml = Checkpoint(), Nvml()
        is_real = checkpoint.simulated_host_memory() is None
        self._machine = Machine(
            nvml=nvml,
            checkpoint=checkpoint,
            processes=Processes(state.leases),
            state=state,
            host=HostMemory(options.host_budget_percent, checkpoint),
            events=Events(),
            files=DeviceFiles(
                options.device_dir or (Path("/dev") if is_real else None),
                nvml.gpus,
                options.state_dir / "device-files",
                state.boot_id,
                options.own_device_files,
            ),
        )
        machine, own_pids = self._machine, {os.getpid()}
        cgroups = Cgroups(options.cgroup_root, machine.nvml, machine.processes)
        self._devices = DeviceStates(machine.nvml.gpus, machine.files)
        self._registry = LeaseRegistry(machine, self._devices, cgroups)
        self._health = Health(machine.nvml, machine.events, self._registry, self._devices)
        canary = Canary(machine, cgroups, own_pids)
        self._self_tests = SelfTests(machine, self._registry, self._devices, self._health, canary)
        self._wake_detector = WakeDetector(self._registry, machine.events)
        self._mover = Mover(machine, self._registry, self._devices, options.park_before_kill)
        self._unattended_resumes = UnattendedResumes(self._registry, self._mover)
        unleased = UnleasedProcesses(
            options.unleased, machine.processes, machine.events, state.holders, own_pids
        )
        watchdog = Watchdog(options.watchdog, machine.processes, machine.events, unleased)
        self._sampler = Sampler(
            machine, self._registry, self._devices, self._mover, self._health, watchdog, options.sample_s
        )
        self._self_tests.load()
        self._registry.adopt()
        for lease in self._registry.all():
            self._mover.adopt(lease)
        requests = Requests(
            machine,
            self._registry,
            self._devices,
            self._self_tests,
            self._mover,
            self._sampler,
            options.watchdog,
        )
        self._server = Server(options.socket, options.allow_uids, requests, machine.events)

    def start(self) -> None:
        """Measure once, then serve in threads."""
        self._sampler.measure()
        for run in (
            self._sampler.run,
            self._sampler.run_exits,
            self._sampler.run_settle,
            self._health.run,
            self._wake_detector.run,
            self._unattended_resumes.run,
            self._server.run,
            self._self_tests.run,
        ):
            threading.Thread(target=run, name=run.__qualname__, daemon=True).start()
        log.info(
            "helper version=%s driver=%s devices=%d leases=%d epoch=%d socket=%s simulated=%s options=%s",
            __version__, self._machine.nvml.driver, len(self._machine.nvml.gpus), len(self._registry.all()),
            self._machine.state.epoch, self._options.socket, self._machine.simulated,
            os.environ.get("GPUSHARE_SIMULATE", "-") if self._machine.simulated else "-",
        )  # fmt: skip

    def stop(self) -> None:
        """Stop serving; suspended leases stay suspended, lease files stay in place.

        Device files get the rights back that they had.
        """
        self._machine.files.restore()
        self._self_tests.stop()
        self._health.stop()
        self._server.stop()
        self._machine.events.close()
        self._wake_detector.stop()
        self._unattended_resumes.stop()
        self._sampler.stop()
        for lease in self._registry.all():
            # A move in progress is in the journal step by step; give it a moment to end.
            if lease.moving.acquire(timeout=STOP_WAIT_S):
                lease.files.close()
        self._machine.processes.close()
        self._machine.state.close()


EXAMPLES = """\
examples:
  gpushare helper --state-dir /var/lib/gpushare-helper --lease-dir /run/gpushare/leases
                  --socket /run/gpushare/helper.sock --allow-uid 985
      as root, for a broker that runs as uid 985
  gpushare helper --state-dir ./state --socket ./state/helper.sock
      on the simulated driver, as the user of the broker and the servers

A real driver lets only root suspend processes: a helper of another user limits and
watches, and suspends nothing.

The state directory must outlive the helper (not /tmp).  The lease directory too, until
the next boot, and it belongs in memory (/run): every process of a lease writes to its
account at each CUDA call.  The users of the servers must be able to pass through it.

Stop the helper before a driver update, a reset of a GPU or a change of MIG mode: the
driver refuses them while a process has the devices open.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpushare helper",
        description="Runs beside the NVIDIA driver: inventory, samples, limits, suspend and resume.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--state-dir", type=Path, required=True, help="the epoch and the journal, on disk")
    parser.add_argument(
        "--lease-dir", type=Path, metavar="PATH",
        help="limit pages and accounts, in memory (default: STATE_DIR/leases)",
    )  # fmt: skip
    parser.add_argument("--socket", type=Path, help="where to listen (default: STATE_DIR/helper.sock)")
    parser.add_argument(
        "--allow-uid", type=int, action="append", default=[], metavar="UID",
        help="also answer this user; root and the helper's own user always have access (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--watchdog", type=WatchdogAction, choices=list(WatchdogAction), default=WatchdogAction.WARN,
        help="on processes beyond their limit: report, also stop them, or do nothing (off: also not on "
        "processes without a lease)",
    )  # fmt: skip
    parser.add_argument(
        "--unleased", choices=["stop", "warn"], default="stop",
        help="on processes without a lease of users that held one, where the device is leased to another "
        "user: report and stop them 30 s later (default), or only report",
    )  # fmt: skip
    parser.add_argument(
        "--stop-uids", type=int, default=1000, metavar="FIRST",
        help="no process of a user below this number is stopped for having no lease (default 1000)",
    )  # fmt: skip
    parser.add_argument(
        "--watchdog-ignore", action="append", default=[], metavar="NAME|/CGROUP",
        help="no process with this name, or below this cgroup, is stopped for having no lease (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--host-budget-percent", type=int, default=50, metavar="PERCENT",
        help="how much of the host's memory suspended leases may take together (default 50)",
    )  # fmt: skip
    parser.add_argument(
        "--cgroup-root", type=Path, metavar="PATH",
        help="a cgroup (v2) below which the helper creates one per lease: for drivers that limit them (r615)",
    )  # fmt: skip
    parser.add_argument(
        "--own-device-files", action="store_true",
        help="let only root and the users of leases open /dev/nvidiaN, each until the lease ends; off by "
        "default, because tools of other users, such as nvidia-smi, see no GPU then (docs/isolation.md)",
    )  # fmt: skip
    parser.add_argument(
        "--device-dir", type=Path, metavar="PATH",
        help="where the device files are (default: /dev; none with the simulated driver)",
    )  # fmt: skip
    parser.add_argument(
        "--park-before-kill", action="store_true",
        help="checkpoint the processes of a lease before it is killed: for drivers on which the end of a "
        "restored process hangs the machine (docs/isolation.md, Drivers)",
    )  # fmt: skip
    parser.add_argument(
        "--sample-s", type=float, default=1.0, metavar="SECONDS", help="time between samples (default 1)"
    )
    return parser


def parse(argv: Sequence[str]) -> Options:
    """The options on a command line; exits with 2 and a usage line when they are wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if not 1 <= given.host_budget_percent <= 95:
        parser.error("--host-budget-percent is 1 to 95")
    if not 0.05 <= given.sample_s <= 10:
        parser.error("--sample-s is 0.05 to 10 seconds")
    if given.stop_uids < 1:
        parser.error("--stop-uids is 1 or more: processes of root are never stopped")
    if any(uid < 0 for uid in given.allow_uid):
        parser.error("--allow-uid is a user's number")
    state_dir = given.state_dir.absolute()
    return Options(
        state_dir=state_dir,
        socket=(given.socket or state_dir / "helper.sock").absolute(),
        lease_dir=given.lease_dir.absolute() if given.lease_dir else None,
        allow_uids=frozenset(given.allow_uid),
        watchdog=given.watchdog,
        unleased=StopRules(
            stops=given.unleased == "stop",
            first_uid=given.stop_uids,
            ignore=tuple(given.watchdog_ignore),
        ),
        host_budget_percent=given.host_budget_percent,
        park_before_kill=given.park_before_kill,
        cgroup_root=given.cgroup_root.absolute() if given.cgroup_root else None,
        own_device_files=given.own_device_files,
        device_dir=given.device_dir.absolute() if given.device_dir else None,
        sample_s=given.sample_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the helper until SIGTERM or SIGINT; 0 after a clean stop, 1 with a reason otherwise."""
    options = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr
    )
    stop_requested, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    # Any thread may get the signal; its number is written to the pipe.
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    _raise_descriptors()
    systemd = notify.of_process()
    try:
        helper = Helper(options)
    except GpuShareError as error:
        print(f"gpushare helper: {error}", file=sys.stderr)
        return 1
    helper.start()
    systemd.ready()
    os.read(stop_requested, 1)
    systemd.stopping()
    # A kill at any step loses nothing, so a call that hangs is not waited for longer than this.
    limit = threading.Timer(STOP_LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    helper.stop()
    log.info("helper stopped")
    # Threads that hang in the driver must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


def _raise_descriptors() -> None:
    """Raise the descriptor limit to the hard one: every process of a lease takes a pidfd."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
