"""Options of the device helper and its command line."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_gpushare.command_line import count
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.gpu.checks.unleased import StopRules
from jupyter_gpushare.gpu.service.tcp import Endpoint
from jupyter_gpushare.protocol.helper import WatchdogAction
from jupyter_gpushare.protocol.helper_tls import BROKER, HELPER, TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperOptions:
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
    endpoint: Endpoint | None = None  # for a broker on another machine
    seat_socket: Path | None = None  # leases need seats
    node: str = ""
    library_dir: Path | None = None  # where the preload library is copied to
    pod_resources: Path | None = None  # socket of the kubelet that lists pods with GPUs


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

MAX_UID = (1 << 32) - 2


def _absolute(path: str) -> Path:
    return Path(path).absolute()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpushare helper",
        description="Runs beside the NVIDIA driver: inventory, samples, limits, suspend and resume.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--state-dir", type=_absolute, required=True, help="the epoch and the journal, on disk"
    )
    parser.add_argument(
        "--lease-dir", type=_absolute, metavar="PATH",
        help="limit pages and accounts, in memory (default: STATE_DIR/leases)",
    )  # fmt: skip
    parser.add_argument("--socket", type=_absolute, help="where to listen (default: STATE_DIR/helper.sock)")
    parser.add_argument(
        "--allow-uid", type=count(0, MAX_UID), action="append", default=[], metavar="UID", dest="allow_uids",
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
        "user: report and stop them 30 s later (default), or only report.  Either way the device takes "
        "nothing new meanwhile (see --watchdog-ignore)",
    )  # fmt: skip
    parser.add_argument(
        "--stop-uids", type=count(1, MAX_UID), default=1000, metavar="FIRST",
        help="no process of a user below this number is stopped for having no lease (default 1000); none of "
        "root ever is",
    )  # fmt: skip
    parser.add_argument(
        "--watchdog-ignore", action="append", default=[], metavar="/CGROUP",
        help="no process below this cgroup is stopped for having no lease (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--host-budget-percent", type=count(1, 95), default=50, metavar="PERCENT",
        help="how much of the host's memory suspended leases may take together (default 50)",
    )  # fmt: skip
    parser.add_argument(
        "--cgroup-root", type=_absolute, metavar="PATH",
        help="a cgroup (v2) below which the helper creates one per lease: for drivers that limit them (r615)",
    )  # fmt: skip
    parser.add_argument(
        "--own-device-files", action="store_true",
        help="let only root and the users of leases open /dev/nvidiaN, each until the lease ends; off by "
        "default, because tools of other users, such as nvidia-smi, see no GPU then (docs/isolation.md)",
    )  # fmt: skip
    parser.add_argument(
        "--device-dir", type=_absolute, metavar="PATH",
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
    _add_network(parser)
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    network = parser.add_argument_group("a broker on another machine (docs/kubernetes.md)")
    network.add_argument(
        "--listen", metavar="HOST:PORT",
        help="also listen on this TCP port, for the broker, with TLS",
    )  # fmt: skip
    network.add_argument(
        "--tls-certificate", type=Path, metavar="PATH",
        help=f"with --listen: this helper's certificate, for the name NODE.{HELPER}, or {HELPER} where all "
        "helpers have one; read again when it changes, like the next two",
    )  # fmt: skip
    network.add_argument(
        "--tls-key", type=Path, metavar="PATH",
        help="with --listen: the key of the certificate; only its owner may read the file",
    )  # fmt: skip
    network.add_argument(
        "--tls-ca", type=Path, metavar="PATH",
        help="with --listen: certificate of the authority that signs those of the helpers and that of the "
        f"broker, which has to name {BROKER}",
    )  # fmt: skip
    network.add_argument(
        "--node", default=socket.gethostname(), metavar="NAME",
        help="name of this node at the broker (default: the host's name)",
    )  # fmt: skip
    network.add_argument(
        "--seat-socket", type=_absolute, metavar="PATH",
        help="listen for seats here; a lease then has device memory only while a seat of it is connected",
    )  # fmt: skip
    network.add_argument(
        "--pod-resources", type=Path, metavar="PATH",
        help="socket on which the kubelet lists the pods with GPUs: a unit pool needs it "
        "(/var/lib/kubelet/pod-resources/kubelet.sock)",
    )  # fmt: skip
    network.add_argument(
        "--install-library", type=_absolute, metavar="FOLDER", dest="library_dir",
        help="copy the preload library into this folder of the node, for the pods of leases",
    )  # fmt: skip


def _endpoint(given: argparse.Namespace) -> Endpoint | None:
    """The TCP port that is asked for.

    Raises:
        GpuShareError: its options are wrong.
    """
    files = (given.tls_certificate, given.tls_key, given.tls_ca)
    if given.listen is None:
        if any(files):
            raise GpuShareError("--tls-certificate, --tls-key and --tls-ca are of --listen, which is missing")
        return None
    host, _, port = given.listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise GpuShareError(f"--listen is HOST:PORT, such as 0.0.0.0:7710, not {given.listen!r}")
    if not all(files):
        raise GpuShareError("--listen needs --tls-certificate, --tls-key and --tls-ca")
    return Endpoint(
        host=host.strip("[]"),
        port=int(port),
        node=given.node,
        tls=TlsFiles(certificate=given.tls_certificate, key=given.tls_key, authority=given.tls_ca),
    )


def parse(argv: Sequence[str]) -> HelperOptions:
    """The options on a command line; exits with 2 and a usage line when they are wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if not 0.05 <= given.sample_s <= 10:
        parser.error("--sample-s is 0.05 to 10 seconds")
    if given.seat_socket and given.cgroup_root:
        parser.error("--cgroup-root moves processes out of the cgroups of their pods: not with --seat-socket")
    if any(not path.startswith("/") for path in given.watchdog_ignore):
        parser.error(
            "--watchdog-ignore takes a cgroup, such as /system.slice/x: a process chooses its own name"
        )
    try:
        endpoint = _endpoint(given)
    except GpuShareError as error:
        parser.error(str(error))
    named = {name: value for name, value in vars(given).items() if name in HelperOptions.__slots__}
    made = {
        "socket": given.socket or given.state_dir / "helper.sock",
        "allow_uids": frozenset(given.allow_uids),
        "unleased": StopRules(
            # On Kubernetes the cluster placed it.
            stops=given.unleased == "stop" and not given.seat_socket,
            first_uid=given.stop_uids,
            ignore=tuple(given.watchdog_ignore),
        ),
        "endpoint": endpoint,
    }
    return HelperOptions(**named | made)
