"""The device helper: one process per GPU machine, the only one that touches the driver.

``gpushare helper`` or ``python -m jupyter_gpushare.gpu.service.helper`` starts it.  It
outlives the broker.  When it ends, suspended leases stay suspended, limit pages
stay in force, and the next helper adopts both from the state directory.

A helper that is bound to its parent (`parent`: ``gpushare broker --respawn``) ends with the parent as long
as it does not serve yet.  Once it serves, it ends when its parent is gone, no broker has sent a request for
`registry.SILENT_S`, and no process of a lease lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from jupyter_gpushare import __version__, parent
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.find_kube import find_kube
from jupyter_gpushare.gpu.checks.canary import Canary
from jupyter_gpushare.gpu.checks.health import HealthChecks
from jupyter_gpushare.gpu.checks.self_tests import SelfTests
from jupyter_gpushare.gpu.checks.unleased import UnleasedProcesses
from jupyter_gpushare.gpu.checks.watchdog import Watchdog
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.driver.nvml import Nvml
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.containers import Containers
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.host_memory import HostMemory
from jupyter_gpushare.gpu.leases.journal import StateDirectory
from jupyter_gpushare.gpu.leases.machine import GpuPods, Machine
from jupyter_gpushare.gpu.leases.processes import Processes
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.leases.seats import MAX_SEATS, SeatTable
from jupyter_gpushare.gpu.moves.guests import Guests
from jupyter_gpushare.gpu.moves.suspend import Mover
from jupyter_gpushare.gpu.moves.vacate import Evictions
from jupyter_gpushare.gpu.moves.wake import UnattendedResumes, WakeDetector
from jupyter_gpushare.gpu.os.cgroups import Cgroups
from jupyter_gpushare.gpu.os.device_files import DeviceFiles
from jupyter_gpushare.gpu.service.exchange import Exchange, SeatSocket
from jupyter_gpushare.gpu.service.options import HelperOptions, parse
from jupyter_gpushare.gpu.service.requests import Requests
from jupyter_gpushare.gpu.service.sampler import Sampler
from jupyter_gpushare.gpu.service.server import Server
from jupyter_gpushare.gpu.service.tcp import TcpServer
from jupyter_gpushare.gpu.turns.turns import Turns
from jupyter_gpushare.native import install_preload
from jupyter_gpushare.procfs import boot_id

log = logging.getLogger(__name__)

# A stop waits this long for a move in progress.
STOP_WAIT_S = 5.0
STOP_LIMIT_S = 2.0
# A helper that is bound to its parent checks this often whether it is needed.
CHECK_S = 1.0


class Helper:
    """All parts of the helper, wired together; `start` runs them."""

    def __init__(self, options: HelperOptions) -> None:
        """Open the driver and adopt the leases of an earlier helper.

        Raises:
            GpuShareError: there is no driver, or another helper runs on this state directory.
        """
        self._options = options
        state = StateDirectory(options.state_dir, boot_id(), options.lease_dir)
        checkpoint, nvml = Checkpoint(), Nvml()
        on_kubernetes = options.seat_socket is not None
        containers = Containers(state.leases, state.containers_file, state.boot_id)
        is_real = checkpoint.simulated_host_memory() is None
        self._machine = Machine(
            nvml=nvml,
            checkpoint=checkpoint,
            processes=Processes(state.leases, containers),
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
            seats=SeatTable(required=on_kubernetes, file=state.unit_pool_file),
            kubelet=_gpu_pods(options.pod_resources) if options.pod_resources else None,
            library=str(install_preload(options.library_dir)) if options.library_dir else "",
        )
        machine, own_pids = self._machine, {os.getpid()}
        cgroups = Cgroups(options.cgroup_root, machine.nvml)
        self._devices = DeviceStates(machine.nvml.gpus, machine.files)
        self._registry = LeaseRegistry(machine, self._devices, cgroups)
        self._health = HealthChecks(machine.nvml, machine.events, self._registry, self._devices)
        self._mover = Mover(
            machine, self._registry, self._devices, self._health.out_of_step, options.park_before_kill
        )
        canary = Canary(machine, cgroups, own_pids, self._mover.reserve)
        self._self_tests = SelfTests(machine, self._registry, self._devices, self._health, canary)
        self._wake_detector = WakeDetector(self._registry, machine.events)
        self._guests = Guests(machine, self._registry, self._devices, self._mover)
        self._unattended_resumes = UnattendedResumes(self._registry, self._mover)
        unleased = UnleasedProcesses(
            options.unleased, machine.processes, machine.events, state.holders, own_pids
        )
        watchdog = Watchdog(options.watchdog, machine.processes, machine.events, unleased)
        self._turns = Turns(self._registry, self._devices, proves_end=checkpoint.proves_end)
        self._sampler = Sampler(
            machine, self._registry, self._devices, self._mover, self._health, watchdog, options.sample_s
        )
        self._self_tests.load()
        self._registry.adopt()
        for lease in self._registry.all():
            self._mover.adopt(lease)
            self._health.out_of_step(lease)
        self._guests.adopt()
        requests = Requests(
            machine,
            self._registry,
            self._devices,
            self._self_tests,
            self._mover,
            self._guests,
            self._sampler,
            watchdog,
        )
        talk = Exchange(requests, machine.events).talk
        self._server = Server(options.socket, options.allow_uids, talk)
        self._tcp = TcpServer(options.endpoint, talk) if options.endpoint else None
        self._evictions = Evictions(machine, self._registry, self._mover)
        self._seats = None
        if options.seat_socket:
            serve = SeatSocket(machine, self._evictions, options.node).talk
            self._seats = Server(options.seat_socket, frozenset(), serve, MAX_SEATS, idle_s=None)

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
            self._guests.run,
            self._turns.run,
            self._server.run,
            self._self_tests.run,
            *([self._tcp.run] if self._tcp else ()),
            *([self._seats.run, self._evictions.run] if self._seats else ()),
            *([self._machine.kubelet.run] if self._machine.kubelet else ()),
        ):
            threading.Thread(target=run, name=run.__qualname__, daemon=True).start()
        log.info(
            "helper version=%s driver=%s devices=%d leases=%d epoch=%d socket=%s simulated=%s options=%s",
            __version__, self._machine.nvml.driver, len(self._machine.nvml.gpus), len(self._registry.all()),
            self._machine.state.epoch, self._options.socket, self._machine.simulated,
            os.environ.get("GPUSHARE_SIMULATE", "-") if self._machine.simulated else "-",
        )  # fmt: skip

    def is_needed(self) -> bool:
        """Return whether a broker uses the helper or a process of a lease lives."""
        return not self._registry.is_unattended() or any(each.processes for each in self._registry.all())

    def stop(self) -> None:
        """Stop serving; suspended leases stay suspended, and lease files stay in place.

        Device files get their original rights back.
        """
        self._machine.files.restore()
        self._self_tests.forget_deaths()
        for server in (self._server, self._tcp, self._seats):
            if server is not None:
                server.stop()
        # No further move begins.  One in progress gets some time to end; the journal has each of its steps.
        for lease in [each for each in self._registry.all() if not each.moving.acquire(blocking=False)]:
            lease.moving.acquire(timeout=STOP_WAIT_S)


def _gpu_pods(kubelet: Path) -> GpuPods:
    """Return the list of pods of the kubelet with this socket.

    Raises:
        GpuShareError: a package that this needs is not installed.
    """
    pods: GpuPods = find_kube("node.pod_resources").KubeletPods(kubelet)
    return pods


def main(argv: Sequence[str] | None = None) -> int:
    """Run the helper until SIGTERM or SIGINT; return 1 and print a reason if it cannot start."""
    options = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr
    )
    stop_requested, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    # Any thread may get the signal; Python writes its number to the pipe.
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    _raise_descriptors()
    systemd = parent.Notifier(os.environ)
    try:
        helper = Helper(options)
    except GpuShareError as error:
        print(f"gpushare helper: {error}", file=sys.stderr)
        return 1
    helper.start()
    systemd.ready()
    starter = parent.release()
    stop = select.poll()  # select(2) takes no descriptor above 1,023
    stop.register(stop_requested, select.POLLIN)
    while not stop.poll(CHECK_S * 1_000 if starter else None):
        if os.getppid() != starter and not helper.is_needed():
            log.info("the process that started this helper is gone, and no broker or lease needs it")
            break
    systemd.stopping()
    # A kill at any step loses nothing, so a hanging call delays the stop no longer than this.
    limit = threading.Timer(STOP_LIMIT_S, os._exit, (0,))
    limit.daemon = True
    limit.start()
    helper.stop()
    log.info("helper stopped")
    # Threads still run, and one that hangs in the driver must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


def _raise_descriptors() -> None:
    """Raise the descriptor limit to the hard limit, because every process of a lease needs a pidfd."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
