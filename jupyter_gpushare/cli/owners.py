"""`gpushare admin owners`, `adopt` and `end`: jobs of users that are absent from the Hub."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import quote

from jupyter_gpushare.cli.output import complain, print_json, print_table, say
from jupyter_gpushare.cli.verbs import EXIT_OK, EXIT_REFUSED, confirm, connect, shown_by
from jupyter_gpushare.errors import RequestError
from jupyter_gpushare.protocol import wire

if TYPE_CHECKING:
    from jupyter_gpushare.client import BlockingClient


def _print(answer: wire.Owners) -> None:
    if not answer.owners:
        say("The Hub has the owners of all sessions and jobs.")
        return
    rows = [
        [x.name, x.created or "unknown", str(x.jobs), str(x.others), "held" if x.held else "absent"]
        for x in answer.owners
    ]
    print_table(["OWNER", "MADE AT", "WAITING JOBS", "OTHERS", ""], rows)


@shown_by(_print)
def owners(client: BlockingClient, args: argparse.Namespace) -> wire.Owners:
    """Owners of sessions and jobs that are absent from the Hub, or were made anew."""
    return client.get("owners", wire.Owners)


def adopt(args: argparse.Namespace) -> int:
    """Give what belongs to such an owner to a user of the Hub.

    gpushare admin adopt ada              to the ada of the Hub now
    gpushare admin adopt ada --to lovelace
    gpushare admin adopt --all            each to the present user of the name
    """
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
                complain(args, error)
                code = EXIT_REFUSED
    print_json(answer) if args.json else _print(answer)
    return code


@shown_by(_print)
def end(client: BlockingClient, args: argparse.Namespace) -> wire.Owners:
    """Fail the waiting jobs of such an owner.

    gpushare admin end ada
    """
    answer = client.get("owners", wire.Owners)
    if names := _names(args, answer):
        confirm(args, f"Fail the waiting jobs of {', '.join(names)}?")
    for name in names:
        answer = client.delete(_path(name), wire.Owners)
    return answer


def _names(args: argparse.Namespace, answer: wire.Owners) -> list[str]:
    if args.all == (args.name is not None):
        args.parser.error("name the owner, or give --all")
    return sorted({owner.name for owner in answer.owners}) if args.all else [args.name]


def _path(name: str) -> str:
    return f"owners/{quote(name, safe='')}"
