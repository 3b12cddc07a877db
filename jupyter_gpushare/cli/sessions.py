"""Verbs of the command line for the user's own sessions: wake, keep, lend, resize, sleep, usage."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from math import floor
from typing import TYPE_CHECKING

from jupyter_gpushare.cli.output import print_json, print_table, say
from jupyter_gpushare.cli.verbs import EXIT_OK, connect
from jupyter_gpushare.errors import NotFound
from jupyter_gpushare.messages import gibibytes, local
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.client import BlockingClient

_HOUR_S = 3600.0


def wake(args: argparse.Namespace) -> int:
    """Request that a suspended session resumes; return the exit code."""
    _act(args, "resume")
    return EXIT_OK


def keep(args: argparse.Namespace) -> int:
    """Keep the GPU of an idle session for a while."""
    lease = _act(args, "keep", wire.KeepRequest(minutes=args.minutes))
    if lease.keep_left_minutes is not None and not args.json:
        left = floor(lease.keep_left_minutes)
        say(f"{left} min of that are left today; `gpushare keep --minutes 0` undoes it.")
    return EXIT_OK


def lend(args: argparse.Namespace) -> int:
    """Lend the GPU of a session now."""
    _act(args, "lend")
    return EXIT_OK


def resize(args: argparse.Namespace) -> int:
    """Give a running session another size on its GPU."""
    request = wire.SizeRequest(gpus=args.gpus, memory=args.memory, borrow=args.borrow)
    with closing(connect(args)) as client:
        lease_id = session_of(client, args.server).id
        lease = client.put(f"leases/{lease_id}/size", request, wire.LeaseStatus)
    if args.json:
        print_json(lease)
        return EXIT_OK
    size, limit = local(lease.size, lease.size_texts), gibibytes(lease.memory_limit_bytes)
    say(
        f"This session has {size} now ({limit}). PyTorch and CuPy see it at once; "
        "JAX and TensorFlow after a restart of their kernel."
    )
    return EXIT_OK


def sleep(args: argparse.Namespace) -> int:
    """Mark a session as never to be put to sleep, or take the mark away."""
    _act(args, "never-sleep" if args.may == "never" else "may-sleep")
    return EXIT_OK


def _act(args: argparse.Namespace, action: str, body: wire.KeepRequest | None = None) -> wire.LeaseStatus:
    with closing(connect(args)) as client:
        lease_id = session_of(client, args.server).id
        lease = client.post(f"leases/{lease_id}/{action}", body, wire.LeaseStatus, repeatable=True)
    if args.json:
        print_json(lease)
    else:
        say(f"{lease.badge}: {local(lease.sentence, lease.sentence_texts)}")
    return lease


def session_of(client: BlockingClient, server: str | None) -> wire.LeaseStatus:
    """Return the lease of a server of the user; None: of the server of this process, or of the only one.

    Raises:
        NotFound: that server holds no GPU, or there are several to choose from.
        RequestError: the broker refused.
        BrokerUnavailable: it does not answer.
    """
    sessions = [lease for lease in client.get("leases", wire.Leases).leases if lease.job is None]
    named = os.environ.get("JUPYTERHUB_SERVER_NAME") if server is None else server
    found = [lease for lease in sessions if lease.server == named]
    if not found and server is None and len(sessions) == 1:
        found = sessions
    if not found:
        which = "This server" if named is None else f"The server {named!r}"
        names = ", ".join(repr(lease.server) for lease in sessions)
        advice = (
            f"Name one that does with --server NAME: {names}"
            if names
            else "Choose Get a GPU in JupyterLab's sidebar, or start a server with a GPU"
        )
        raise NotFound(f"{which} holds no GPU. {advice}")
    return found[0]


def usage(args: argparse.Namespace) -> int:
    """Print the user's GPU-hours of the last seven days."""
    with closing(connect(args)) as client:
        week = client.get("history", wire.History)
    if args.json:
        print_json(week)
        return EXIT_OK
    if week.days:
        rows = [[d.day, d.project, _hours(d.used_gpu_s), _hours(d.lent_gpu_s)] for d in week.days]
        total = ["total", "", _hours(week.used_gpu_s), _hours(week.lent_gpu_s)]
        print_table(["DAY", "PROJECT", "USED", "LENT"], [*rows, total])
        print("GPU-hours; days in UTC.")
    else:
        print("No GPU was used in the last seven days.")
    if week.helped_jobs:
        jobs = "1 job" if week.helped_jobs == 1 else f"{week.helped_jobs} jobs"
        say(f"Your idle sessions lent their GPUs to {jobs}.")
    return EXIT_OK


def _hours(gpu_s: float) -> str:
    """Return hours with enough digits that a small number is not printed as 0."""
    hours = gpu_s / _HOUR_S
    return f"{hours:.1f}" if hours >= 0.05 or not gpu_s else f"{hours:.3f}"
