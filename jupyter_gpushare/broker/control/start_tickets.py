"""Tickets of starts: the epoch that the start of a job's server carries through the Hub.

The broker hands a ticket to the Hub with the request to start a server, the Hub's spawner shows it
when the start is carried out, which may be much later.  The Hub keeps it among the options of the
server, which its user may read and replace.  So a ticket is the epoch and a MAC over epoch, user and
server, with the spawner's token as key, which no user has ("EPOCH.MAC").
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

from jupyter_gpushare.backends.base import ServerKey

_LABEL = "gpushare start of a job's server"


class StartTickets:
    """Issues tickets in the epoch of this broker, and reads those of all brokers of the site."""

    def __init__(self, epoch: Callable[[], int], tokens: Sequence[str]) -> None:
        """``tokens``: of the spawner; the first signs, any of them is accepted."""
        self._epoch = epoch
        self.tokens = tuple(tokens)

    def issue(self, key: ServerKey) -> str:
        """Return the ticket of a start that this broker asks for now."""
        epoch = self._epoch()
        return f"{epoch}.{_mac(self.tokens[0], epoch, key)}"

    def epoch_of(self, key: ServerKey, ticket: str) -> int | None:
        """Return the epoch of the broker that asked for this start; None: no broker of this site did."""
        number, _, mac = ticket.partition(".")
        if not (number.isascii() and number.isdecimal() and len(number) < 16 and mac.isascii()):
            return None
        epoch = int(number)
        is_known = any(hmac.compare_digest(mac, _mac(token, epoch, key)) for token in self.tokens)
        return epoch if is_known else None


def _mac(token: str, epoch: int, key: ServerKey) -> str:
    text = "\0".join((_LABEL, str(epoch), key.user, key.server))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
