"""The command line ``gpushare``: ``status``, ``submit``, ``jobs``, ``logs``, ``wake``, ...

Exit codes: 0 done, 1 refused (or the job did not succeed) with a reason,
2 usage, 3 the broker does not answer.  The result goes to standard
output, everything else to standard error.  With ``--json`` both are JSON.

Verbs that talk to the broker take its address and a token from ``--url`` and
``--token``, else from the environment that the Hub's spawner gives to every
server.  Each verb imports what it needs, to keep start-up fast.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType

from jupyter_gpushare.cli.output import complain
from jupyter_gpushare.cli.parser import parser, split_command
from jupyter_gpushare.cli.verbs import EXIT_OK, EXIT_REFUSED, EXIT_UNREACHABLE
from jupyter_gpushare.errors import BrokerUnavailable, GpuShareError
from jupyter_gpushare.find_kube import PACKAGE, find_kube, is_installed

__all__ = ["main"]

EXIT_INTERRUPTED = 130  # shells use this code for SIGINT

# Verbs with their own command lines; those for Kubernetes may not be installed.
SERVICES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "simulate": ("jupyter_gpushare.sim.run", "replay a trace against the policy"),
        "broker": ("jupyter_gpushare.broker.app", "run the broker (a JupyterHub service)"),
        "kube": (f"{PACKAGE}.command_line", "Queues for a Kubernetes cluster, and whether it is ready"),
        "helper": ("jupyter_gpushare.gpu.service.helper", "run the device helper of a GPU machine"),
        "seat": (f"{PACKAGE}.node.seat", "stand for a lease on a Kubernetes node"),
        "canary": (f"{PACKAGE}.node.canary", "print which GPUs a pod sees"),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code (see the module's docstring)."""
    if argv is None:
        _in_utf8()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in SERVICES:
        try:
            service = _service(SERVICES[words[0]][0])
        except GpuShareError as error:
            print(f"gpushare {words[0]}: {error}", file=sys.stderr)
            return EXIT_REFUSED
        return int(service.main(words[1:]) or EXIT_OK)
    words, command = split_command(words)
    shown = {verb: row for verb, row in SERVICES.items() if is_installed() or not _is_of_kube(row[0])}
    args = parser(shown).parse_args(words)
    if command is not None:
        if args.command:
            args.parser.error(
                f"{args.command[0]!r} stands before --; options come first, then -- and the command"
            )
        args.command = command
    try:
        return int(args.run(args))
    except GpuShareError as error:
        complain(args, error)
        return EXIT_UNREACHABLE if isinstance(error, BrokerUnavailable) else EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) closed the pipe, so Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _is_of_kube(module: str) -> bool:
    return module.startswith(f"{PACKAGE}.")


def _service(module: str) -> ModuleType:
    """Return the module of a verb.

    Raises:
        GpuShareError: the verb is for Kubernetes, and its package is not installed.
    """
    if _is_of_kube(module):
        return find_kube(module.removeprefix(f"{PACKAGE}."))
    return importlib.import_module(module)


def _in_utf8() -> None:
    """Restart this program in UTF-8 mode if the locale has another encoding.

    Arguments, file names and output are then UTF-8, as the broker expects.
    """
    if not sys.flags.utf8_mode and sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606
