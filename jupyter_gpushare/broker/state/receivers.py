"""Where the administrator lets the broker announce what happens to jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire

_URL_CHARS = 2_000
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}@[A-Za-z0-9][A-Za-z0-9.-]{0,252}")


@dataclass(frozen=True, slots=True)
class Receivers:
    """Where messages go; empty: nowhere."""

    url: str = ""  # gets JSON by POST
    mail_command: tuple[str, ...] = ()  # gets a mail on its standard input
    mail_to: str = "{user}"  # an address, with {user} for the name of the job's owner
    mail_from: str = ""

    def address_of(self, user: str) -> str:
        """Return the mail address of a user.

        Raises:
            InvalidRequest: the name of the user makes none.
        """
        address = self.mail_to.replace("{user}", user)
        if not _ADDRESS.fullmatch(address):
            raise InvalidRequest("this site has no mail address for %1", repr(user[:60]))
        return address

    def check(self, user: str, request: wire.JobRequest) -> None:
        """Refuse a job that asks for mail where there is none.

        Raises:
            InvalidRequest: says what to change.
        """
        if request.notify_mail and not self.mail_command:
            raise InvalidRequest(
                "this site sends no mail: submit without it, or with the address of a webhook (--notify)"
            )
        if request.notify_mail:
            self.address_of(user)


def is_url(text: str) -> bool:
    """Return whether a text is an http or https URL with a host, of printable ASCII without blanks."""
    if len(text) > _URL_CHARS or not text.isascii() or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
