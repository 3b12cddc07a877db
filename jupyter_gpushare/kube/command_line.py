"""``gpushare kube``: commands for the administrator of a Kubernetes cluster.

``queues`` prints the Queues and priority classes of the configured projects.  ``check`` examines a
cluster; it starts nothing, except a canary with ``--canary``.  Both read the broker's configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlparse

from traitlets import TraitError

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.state.policy import Policy
from jupyter_gpushare.cli.checks import named, report
from jupyter_gpushare.cli.options import JSON
from jupyter_gpushare.cli.output import print_json
from jupyter_gpushare.command_line import Option, Parser, Verb
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.find_kube import find_kube
from jupyter_gpushare.kube.broker import queue_projects
from jupyter_gpushare.kube.checks.cluster import examine
from jupyter_gpushare.kube.checks.hub import BrokerPod, hub_checks, not_examined
from jupyter_gpushare.kube.checks.surroundings import parse_list
from jupyter_gpushare.kube.cluster.queues import priority_classes, queues
from jupyter_gpushare.kube.settings import GPUShareKube

EXAMPLES = """\
gpushare kube queues --config broker_config.py | kubectl apply -f -
    create the Queues and priority classes of the configured projects, or change their numbers
gpushare kube check --config broker_config.py
gpushare kube check --config broker_config.py --canary
    before users come, with the rights of the broker
kubectl -n jhub get deployments,persistentvolumeclaims,networkpolicies -o json |
    gpushare kube check --config broker_config.py --hub -
    the Hub's namespace too, in which the broker has no rights
""".splitlines()


def configured(file: Path) -> GPUShareBroker:
    """Return a broker with the configuration of a file, without running it.

    Raises:
        TraitError: a setting is invalid, or the file cannot be read.
    """
    broker = GPUShareBroker()
    broker.initialize(["--config", str(file)])
    return broker


def print_queues(broker: GPUShareBroker, args: argparse.Namespace) -> int:
    """Print the Queues and priority classes of the configured projects, as JSON."""
    policy = broker.policy()
    items = [*queues(queue_projects(policy), policy.min_run_s), *priority_classes(_levels(policy))]
    print_json({"apiVersion": "v1", "kind": "List", "items": items})
    return 0


def check(broker: GPUShareBroker, args: argparse.Namespace) -> int:
    """Examine the cluster: its API server, the broker's rights, Queues, KAI's settings and nodes."""
    policy, kube = broker.policy(), GPUShareKube(parent=broker)
    hub = hub_checks(parse_list(_read(args.hub)), _broker_pod(broker, kube)) if args.hub else not_examined()
    checks = asyncio.run(examine(kube, queue_projects(policy), _levels(policy)))
    if args.canary:
        canary = find_kube("checks.canary")
        checks += named({canary.NAME: asyncio.run(canary.canary(kube))})
    return report(checks + hub, as_json=args.json)


def _levels(policy: Policy) -> int:
    """Return the number of LAS queues of jobs."""
    return len(policy.las_thresholds_gpu_s) + 1


def _read(file: str) -> bytes:
    """Return the content of a file, or of standard input for ``-``.

    Raises:
        GpuShareError: it cannot be read.
    """
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise GpuShareError(f"{file} cannot be read: {error.strerror}") from None


def _own_address() -> str:
    """Return the IP address of this pod; empty outside a cluster, or if its name has no address."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        with contextlib.suppress(OSError):
            return socket.gethostbyname(socket.gethostname())
    return ""


def _broker_pod(broker: GPUShareBroker, kube: GPUShareKube) -> BrokerPod:
    return BrokerPod(
        namespace=kube.namespace,
        address=_own_address(),
        http_port=urlparse(os.environ.get("JUPYTERHUB_SERVICE_URL", "")).port or 8888,
        tls_port=int(broker.tls_address.rpartition(":")[2] or 0),
    )


_CONFIG = Option("--config FILE", "of the broker", Path, required=True)
VERBS = (
    Verb(print_queues, _CONFIG, name="queues"),
    Verb(
        check,
        _CONFIG,
        JSON,
        Option(
            "--canary",
            "also start a pod on a node, at most one minute for each way of telling it a GPU, and "
            "say which works",
        ),
        Option(
            "--hub FILE",
            "also examine the Hub's namespace: what kubectl printed of it; - reads standard input",
            default="",
        ),
    ),
)


def main(argv: Sequence[str]) -> int:
    """Run ``gpushare kube``; return its exit code."""
    parser = Parser(
        prog="gpushare kube",
        description="GPUs of a Kubernetes cluster with KAI-Scheduler.",
        examples=EXAMPLES,
    )
    parser.add_verbs(VERBS, examples=EXAMPLES)
    args = parser.parse_args(argv)
    try:
        return int(args.run(configured(args.config), args))
    except (GpuShareError, TraitError) as error:
        print(f"gpushare kube: {error}", file=sys.stderr)
        return 1
