"""Verbs of the command line for the user's own sessions: wake, keep, lend, resize, sleep, usage."""

from __future__ import annotations

import argparse
import os
from math import floor
from typing import TYPE_CHECKING

from jupyter_gpushare.cli.output import print_table, say
from jupyter_gpushare.cli.verbs import shown_by
from jupyter_gpushare.errors import NotFound
from jupyter_gpushare.messages import gibibytes, local
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.client import BlockingClient

_HOUR_S = 3600.0


def _print_lease(lease: wire.LeaseStatus) -> None:
    say(f"{lease.badge}: {local(lease.sentence, lease.sentence_texts)}")


def _print_keep(lease: wire.LeaseStatus) -> None:
    _print_lease(lease)
    if lease.keep_left_minutes is not None:
        left = floor(lease.keep_left_minutes)
        say(f"{left} min of that are left today; `gpushare keep --minutes 0` undoes it.")


def _print_size(lease: wire.LeaseStatus) -> None:
    size, limit = local(lease.size, lease.size_texts), gibibytes(lease.memory_limit_bytes)
    say(
        f"This session has {size} now ({limit}). PyTorch and CuPy see it at once; "
        "JAX and TensorFlow after a restart of their kernel."
    )


@shown_by(_print_lease)
def wake(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Get the GPU of my sleeping session back."""
    return _act(client, args, "resume")


@shown_by(_print_keep)
def keep(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Keep the GPU of my idle session for a while, out of today's budget.

    gpushare keep
    gpushare keep --minutes 60
    gpushare keep --minutes 0         undo it
    """
    return _act(client, args, "keep", wire.KeepRequest(minutes=args.minutes))


@shown_by(_print_lease)
def lend(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Lend the GPU of my session now."""
    return _act(client, args, "lend")


@shown_by(_print_lease)
def sleep(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Whether my sessions may be put to sleep.

    gpushare sleep never            this server keeps its GPU, if its project has that right
    gpushare sleep allow
    """
    return _act(client, args, "never-sleep" if args.may == "never" else "may-sleep")


@shown_by(_print_size)
def resize(client: BlockingClient, args: argparse.Namespace) -> wire.LeaseStatus:
    """Make the part of a GPU of my running session larger or smaller.

    gpushare resize --gpus 1/2
    gpushare resize --memory 20GiB
    gpushare resize --gpus 1 --borrow     also beyond what my project is guaranteed
    """
    request = wire.SizeRequest(gpus=args.gpus, memory=args.memory, borrow=args.borrow)
    return client.put(f"leases/{session_of(client, args.server).id}/size", request, wire.LeaseStatus)


def _act(
    client: BlockingClient, args: argparse.Namespace, action: str, body: wire.KeepRequest | None = None
) -> wire.LeaseStatus:
    path = f"leases/{session_of(client, args.server).id}/{action}"
    return client.post(path, body, wire.LeaseStatus, repeatable=True)


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


def _print_usage(week: wire.History) -> None:
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


@shown_by(_print_usage)
def usage(client: BlockingClient, args: argparse.Namespace) -> wire.History:
    """My GPU-hours of the last seven days."""
    return client.get("history", wire.History)


def _hours(gpu_s: float) -> str:
    """Return hours with enough digits that a small number is not printed as 0."""
    hours = gpu_s / _HOUR_S
    return f"{hours:.1f}" if hours >= 0.05 or not gpu_s else f"{hours:.3f}"
