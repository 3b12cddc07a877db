"""``gpushare kube``: what an administrator of a Kubernetes cluster prepares, and whether it is right.

``queues`` prints the Queues and priority classes of the configured projects; ``check`` examines a
cluster, and starts nothing but a canary, where it is asked to.  Both read the broker's configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from traitlets import TraitError

from jupyter_gpushare.backends.kubernetes.queues import priority_classes, queues
from jupyter_gpushare.backends.kubernetes.surroundings import parse_list
from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.cluster import queue_projects
from jupyter_gpushare.broker.kube_settings import GPUShareKube
from jupyter_gpushare.cli.checks import named, report
from jupyter_gpushare.cli.kube_checks import NAME, BrokerPod, canary, examine, hub_checks, not_examined
from jupyter_gpushare.cli.options import JSON
from jupyter_gpushare.cli.output import print_json
from jupyter_gpushare.command_line import Option, Parser, Verb
from jupyter_gpushare.core.model import Project
from jupyter_gpushare.errors import GpuShareError

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


@dataclass(frozen=True, slots=True)
class Configured:
    """What the configuration file says."""

    projects: tuple[Project, ...]
    min_run_s: float
    levels: int  # LAS queues of jobs
    kube: GPUShareKube
    tls_port: int  # of the broker; 0: none


def configured(file: Path) -> Configured:
    """Return what the broker's configuration says of projects and cluster.

    Raises:
        InvalidRequest: a quota has no number of GPUs.
        TraitError: a setting is wrong, or the file cannot be read.
    """
    app = GPUShareBroker()
    app.initialize(["--config", str(file)])
    policy = app.policy()
    levels = len(policy.las_thresholds_gpu_s) + 1
    tls_port = int(app.tls_address.rpartition(":")[2] or 0)
    return Configured(
        tuple(queue_projects(policy)), policy.min_run_s, levels, GPUShareKube(parent=app), tls_port
    )


def print_queues(site: Configured, args: argparse.Namespace) -> int:
    """Print the Queues and priority classes of the configured projects, as JSON."""
    items = [*queues(site.projects, site.min_run_s), *priority_classes(site.levels)]
    print_json({"apiVersion": "v1", "kind": "List", "items": items})
    return 0


def check(site: Configured, args: argparse.Namespace) -> int:
    """Examine the cluster: API server, rights, Queues, KAI's settings, nodes."""
    hub = hub_checks(parse_list(_read(args.hub)), _broker_pod(site)) if args.hub else not_examined()
    checks = asyncio.run(examine(site.kube, site.projects, site.levels))
    if args.canary:
        checks += named({NAME: asyncio.run(canary(site.kube))})
    return report(checks + hub, as_json=args.json)


def _read(file: str) -> bytes:
    """Return the content of a file; of standard input for ``-``.

    Raises:
        GpuShareError: it cannot be read.
    """
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise GpuShareError(f"{file} cannot be read: {error.strerror}") from None


def _own_address() -> str:
    """Return the address of this pod; empty outside a cluster, or where its name has none."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        with contextlib.suppress(OSError):
            return socket.gethostbyname(socket.gethostname())
    return ""


def _broker_pod(site: Configured) -> BrokerPod:
    return BrokerPod(
        namespace=site.kube.namespace,
        address=_own_address(),
        http_port=urlparse(os.environ.get("JUPYTERHUB_SERVICE_URL", "")).port or 8888,
        tls_port=site.tls_port,
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
    """Entry of ``gpushare kube``."""
    parser = Parser(
        prog="gpushare kube",
        description="GPUs of a Kubernetes cluster with KAI-Scheduler.",
        examples=EXAMPLES,
    )
    parser.add_verbs(VERBS, examples=EXAMPLES)
    args = parser.parse_args(argv)
    try:
        site = configured(args.config)
        return int(args.run(site, args))
    except (GpuShareError, TraitError) as error:
        print(f"gpushare kube: {error}", file=sys.stderr)
        return 1
