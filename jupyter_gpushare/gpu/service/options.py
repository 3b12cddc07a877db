"""Options of the device helper and its command line."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_gpushare.command_line import Option, Parser, count
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.gpu.checks.unleased import StopRules
from jupyter_gpushare.gpu.service.tcp import Endpoint
from jupyter_gpushare.protocol.helper import WatchdogAction
from jupyter_gpushare.protocol.helper_tls import BROKER, HELPER, TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperOptions:
    """The options of a helper."""

    state_dir: Path
    socket: Path
    lease_dir: Path | None = None
    allow_uids: frozenset[int] = frozenset()
    watchdog: WatchdogAction = WatchdogAction.WARN
    unleased: StopRules = field(default_factory=StopRules)
    host_budget_percent: int = 50
    cgroup_root: Path | None = None
    own_device_files: bool = False
    device_dir: Path | None = None  # None: /dev, or no device files with the simulated driver
    park_before_kill: bool = False
    sample_s: float = 1.0
    endpoint: Endpoint | None = None  # for a broker on another machine
    seat_socket: Path | None = None  # leases need seats
    node: str = ""
    library_dir: Path | None = None  # the preload library is copied into it
    pod_resources: Path | None = None  # the kubelet's socket that lists pods with GPUs


_EXAMPLES = (
    "gpushare helper --state-dir /var/lib/gpushare-helper --lease-dir /run/gpushare/leases",
    "                --socket /run/gpushare/helper.sock --allow-uid 985",
    "    as root, for a broker that runs as uid 985",
    "gpushare helper --state-dir ./state --socket ./state/helper.sock",
    "    on the simulated driver, as the user of the broker and the servers",
)
_ADVICE = """\
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


_OPTIONS = (
    Option("--state-dir STATE_DIR", "the epoch and the journal, on disk", _absolute, required=True),
    Option("--lease-dir PATH", "limit pages and accounts, in memory (default: STATE_DIR/leases)", _absolute),
    Option("--socket SOCKET", "where to listen (default: STATE_DIR/helper.sock)", _absolute),
    Option(
        "--allow-uid UID ...",
        "also answer this user; root and the helper's own user always have access (repeatable)",
        count(0, MAX_UID),
        dest="allow_uids",
    ),
    Option(
        "--watchdog",
        "on processes beyond their limit: report, also stop them, or do nothing (off: also not on "
        "processes without a lease)",
        WatchdogAction,
        choices=list(WatchdogAction),
        default=WatchdogAction.WARN,
    ),
    Option(
        "--unleased",
        "on processes without a lease of users that held one, where the device is leased to another "
        "user: report and stop them 30 s later (default), or only report.  Either way the device takes "
        "nothing new meanwhile (see --watchdog-ignore)",
        ["stop", "warn"],
        default="stop",
    ),
    Option(
        "--stop-uids FIRST",
        "no process of a user below this number is stopped for having no lease (default 1000); none of "
        "root ever is",
        count(1, MAX_UID),
        default=1000,
    ),
    Option(
        "--watchdog-ignore /CGROUP ...",
        "no process below this cgroup is stopped for having no lease (repeatable)",
    ),
    Option(
        "--host-budget-percent PERCENT",
        "how much of the host's memory suspended leases may take together (default 50)",
        count(1, 95),
        default=50,
    ),
    Option(
        "--cgroup-root PATH",
        "a cgroup (v2) below which the helper creates one per lease: for drivers that limit them (r615)",
        _absolute,
    ),
    Option(
        "--own-device-files",
        "let only root and the users of leases open /dev/nvidiaN, each until the lease ends; off by "
        "default, because tools of other users, such as nvidia-smi, see no GPU then (docs/isolation.md)",
    ),
    Option(
        "--device-dir PATH",
        "where the device files are (default: /dev; none with the simulated driver)",
        _absolute,
    ),
    Option(
        "--park-before-kill",
        "checkpoint the processes of a lease before it is killed: for drivers on which the end of a "
        "restored process hangs the machine (docs/isolation.md, Drivers)",
    ),
    Option("--sample-s SECONDS", "time between samples (default 1)", float, default=1.0),
)
_OF_NETWORK = (
    Option("--listen HOST:PORT", "also listen on this TCP port, for the broker, with TLS"),
    Option(
        "--tls-certificate PATH",
        f"with --listen: this helper's certificate, for the name NODE.{HELPER}, or {HELPER} where all "
        "helpers have one; read again when it changes, like the next two",
        Path,
    ),
    Option(
        "--tls-key PATH",
        "with --listen: the key of the certificate; only its owner may read the file",
        Path,
    ),
    Option(
        "--tls-ca PATH",
        "with --listen: certificate of the authority that signs those of the helpers and that of the "
        f"broker, which has to name {BROKER}",
        Path,
    ),
    Option(
        "--node NAME",
        "name of this node at the broker (default: the host's name)",
        default=socket.gethostname(),
    ),
    Option(
        "--seat-socket PATH",
        "listen for seats here; a lease then has device memory only while a seat of it is connected",
        _absolute,
    ),
    Option(
        "--pod-resources PATH",
        "socket on which the kubelet lists the pods with GPUs: a unit pool needs it "
        "(/var/lib/kubelet/pod-resources/kubelet.sock)",
        Path,
    ),
    Option(
        "--install-library FOLDER",
        "copy the preload library into this folder of the node, for the pods of leases",
        _absolute,
        dest="library_dir",
    ),
)


def _parser() -> Parser:
    parser = Parser(
        prog="gpushare helper",
        description="Runs beside the NVIDIA driver: inventory, samples, limits, suspend and resume.",
        examples=_EXAMPLES,
        after=_ADVICE,
    )
    network = parser.add_argument_group("a broker on another machine (docs/kubernetes.md)")
    for group, options in ((parser, _OPTIONS), (network, _OF_NETWORK)):
        for option in options:
            option.add_to(group)
    return parser


def _endpoint(given: argparse.Namespace) -> Endpoint | None:
    """Return the TCP endpoint of ``--listen``, or None without that option.

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
    """Return the options on a command line; exit with 2 and a usage line if they are wrong."""
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
            # On Kubernetes the cluster placed the process.
            stops=given.unleased == "stop" and not given.seat_socket,
            first_uid=given.stop_uids,
            ignore=tuple(given.watchdog_ignore),
        ),
        "endpoint": endpoint,
    }
    return HelperOptions(**named | made)
