"""`gpushare admin owners`, `adopt` and `end`: jobs of users that are absent from the Hub."""

from __future__ import annotations

import argparse
from contextlib import closing
from urllib.parse import quote

from jupyter_gpushare.cli.output import confirmed, note, print_json, print_table, say
from jupyter_gpushare.cli.verbs import EXIT_OK, EXIT_REFUSED, connect
from jupyter_gpushare.errors import RequestError
from jupyter_gpushare.protocol import wire


def owners(args: argparse.Namespace) -> int:
    """Print the owners of leases that are absent from the Hub; return the exit code."""
    with closing(connect(args)) as client:
        return _print(args, client.get("owners", wire.Owners))


def adopt(args: argparse.Namespace) -> int:
    """Give the jobs of one such owner, or of all of them, to users of the Hub; return the exit code."""
    if args.name is None and args.to is not None:
        args.parser.error("--to goes with the name of one owner")
    code = EXIT_OK
    with closing(connect(args)) as client:
        answer = client.get("owners", wire.Owners)
        for name in _names(args, answer):
            try:
                answer = client.put(_path(name), wire.Adoption(to=args.to), wire.Owners)
            except RequestError as error:
                if not args.all:
                    raise
                note(str(error))
                code = EXIT_REFUSED
    return max(code, _print(args, answer))


def end(args: argparse.Namespace) -> int:
    """Fail the waiting jobs of one such owner, or of all of them; return the exit code."""
    with closing(connect(args)) as client:
        answer = client.get("owners", wire.Owners)
        names = _names(args, answer)
        whose = f"of {', '.join(names)}"
        if names and not args.yes and not confirmed(args, f"Fail the waiting jobs {whose}?"):
            return EXIT_REFUSED
        for name in names:
            answer = client.delete(_path(name), wire.Owners)
    return _print(args, answer)


def _names(args: argparse.Namespace, answer: wire.Owners) -> list[str]:
    if args.all == (args.name is not None):
        args.parser.error("name the owner, or give --all")
    return sorted({owner.name for owner in answer.owners}) if args.all else [args.name]


def _path(name: str) -> str:
    return f"owners/{quote(name, safe='')}"


def _print(args: argparse.Namespace, answer: wire.Owners) -> int:
    if args.json:
        print_json(answer)
    elif answer.owners:
        rows = [
            [x.name, x.created or "unknown", str(x.jobs), str(x.others), "held" if x.held else "absent"]
            for x in answer.owners
        ]
        print_table(["OWNER", "MADE AT", "WAITING JOBS", "OTHERS", ""], rows)
    else:
        say("The Hub has the owners of all sessions and jobs.")
    return EXIT_OK
