"""The runner's pages, behind the Hub's login: the log, and the state as JSON.

* ``.../``            the end of the log, for people
* ``.../log?offset=N`` raw bytes from N on, at most `CHUNK_BYTES`; the header
  ``X-Gpushare-Offset`` has the start of the answer (after N if the middle of a long
  log was left out), ``X-Gpushare-Next`` the offset of the next piece,
  ``X-Gpushare-Left-Out`` the bytes that the disk did not take, ``X-Gpushare-Why`` the reason
* ``.../status``      `AttemptRecord` as JSON, with progress
* ``.../api``         the Hub's readiness probe, without login

All other pages require the Hub's scope for the owner's servers.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jupyterhub import __version__ as hub_version
from jupyterhub.services.auth import HubOAuth, HubOAuthCallbackHandler, HubOAuthenticated
from tornado import web
from tornado.escape import xhtml_escape

from jupyter_gpushare.listener import Gate, Listener, connections_allowed
from jupyter_gpushare.protocol.jobfiles import (
    RECENT_BYTES,
    AttemptRecord,
    BoundedLog,
    Disk,
    Piece,
    log_end,
    read_log,
)

CHUNK_BYTES = 1 << 20
# Few enough that the limit of open files, which the command inherits, need not be raised.
MAX_CONNECTIONS = 200
_REFRESH_S = 5

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">{refresh}
<title>{name} - training job {id}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 80rem; padding: 0 1rem }}
pre {{ border: 1px solid gray; border-radius: .3rem; padding: .8rem; white-space: pre-wrap }}
</style></head>
<body><h1>{name}</h1>
<p role="status">{sentence}</p>
<p>Job {id}, attempt {attempt}. The log is in your files: <code>{log}</code></p>
<h2>{heading}</h2>
<pre tabindex="0">{text}</pre>
</body></html>
"""

Now = Callable[[], tuple[AttemptRecord, Mapping[str, float | None]]]
# Returns None if this runner starts nothing, because the attempt has a result already.
Log = Callable[[], BoundedLog | None]


class _Open(web.RequestHandler):
    """Answers the Hub's readiness probe, without authentication."""

    def initialize(self, seen: Callable[[], None]) -> None:
        self._seen = seen

    def set_default_headers(self) -> None:
        self.set_header("X-JupyterHub-Version", hub_version)

    def get(self) -> None:
        self.finish({"version": hub_version})

    def on_finish(self) -> None:
        self._seen()


class _Callback(HubOAuthCallbackHandler):
    """Ends a login that a page began, with the `HubOAuth` of the pages, which has the state and verifier."""

    def initialize(self, auth: HubOAuth) -> None:
        self.hub_auth = auth


class _Private(HubOAuthenticated, web.RequestHandler):
    def initialize(self, gate: Gate, now: Now, log: Log, disk: Disk, auth: HubOAuth) -> None:
        self._gate = gate
        self._now = now
        self._printed = log
        self._disk = disk
        self.hub_auth = auth

    def set_default_headers(self) -> None:
        self.set_header("X-JupyterHub-Version", hub_version)
        self.set_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")

    async def prepare(self) -> None:
        # HubAuth caches the user, so that get_current_user does not block the event loop.
        user = await self.hub_auth.get_user(self, sync=False)
        if user is not None and self.hub_auth.check_scopes(self.hub_auth.access_scopes, user):
            stream = self.request.connection.stream  # type: ignore[union-attr]
            self._gate.prove(stream, f"{user.get('kind', 'user')} {user['name']}")

    async def read(self, offset: int) -> Piece:
        """Return a piece of the log, from memory if the disk does not answer.

        A negative ``offset`` counts from the end.
        """
        log = self._printed()
        try:
            if log is not None:
                return await self._disk.ask(log.read, offset, CHUNK_BYTES)
            return await self._disk.ask(_stored, Path(self._now()[0].log), offset)
        except TimeoutError:
            held = Piece(max(0, offset), b"") if log is None else log.held(offset, CHUNK_BYTES)
            # The bytes before it may be in the file, so the reader must try again.
            return held if held.offset <= max(0, offset) else Piece(max(0, offset), b"")

    def offset(self) -> int:
        given = self.get_query_argument("offset", "0")
        if not (given.isascii() and given.isdigit() and len(given) <= 18):
            raise web.HTTPError(400, "offset is a number of bytes from 0")
        return int(given)


class _LogPage(_Private):
    @web.authenticated
    async def get(self) -> None:
        record, _ = self._now()
        log = self._printed()
        piece = await self.read(-RECENT_BYTES) if log is None else log.recent()
        running = record.state != "ended"
        heading = "Log" if piece.offset == 0 else f"The end of the log (from byte {piece.offset})"
        if log is not None and log.left_out_bytes:
            heading = (
                f"The last 64 KiB; {log.left_out_bytes:,} bytes could not be written to the log: {log.why}"
            )
        self.finish(
            _PAGE.format(
                refresh=f'<meta http-equiv="refresh" content="{_REFRESH_S}">' if running else "",
                name=xhtml_escape(record.name),
                id=xhtml_escape(record.id),
                attempt=record.attempt,
                sentence=xhtml_escape(sentence(record)),
                log=xhtml_escape(record.log),
                heading=xhtml_escape(heading),
                text=xhtml_escape(piece.data.decode(errors="replace")),
            )
        )


class _RawLog(_Private):
    @web.authenticated
    async def get(self) -> None:
        log, piece = self._printed(), await self.read(self.offset())
        if log is not None and (left_out := log.left_out_bytes):
            self.set_header("X-Gpushare-Left-Out", str(left_out))
            self.set_header("X-Gpushare-Why", log.why)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.set_header("X-Gpushare-Offset", str(piece.offset))
        self.set_header("X-Gpushare-Next", str(piece.next_offset))
        self.finish(piece.data)


class _StatusPage(_Private):
    @web.authenticated
    def get(self) -> None:
        record, progress = self._now()
        self.finish({**asdict(record), **progress})


def _stored(path: Path, offset: int) -> Piece:
    return read_log(path, max(0, log_end(path) + offset) if offset < 0 else offset, CHUNK_BYTES)


def sentence(record: AttemptRecord) -> str:
    """Return the state of the attempt as a sentence for users."""
    if record.state == "starting":
        return "Starting."
    if record.state == "running":
        return "Running. This page reloads itself."
    if record.reason:
        return record.reason
    if record.exit_code == 0:
        return "Done."
    return f"Ended with exit code {record.exit_code}."


def server(
    prefix: str, tls: ssl.SSLContext | None, *, now: Now, log: Log, disk: Disk, seen: Callable[[], None]
) -> Listener:
    """Return the server of the runner's pages below ``prefix``; it calls ``seen`` after each probe.

    Raises:
        ValueError: the Hub set no access scopes, so the pages would admit any user.
    """
    gate = Gate(connections_allowed(MAX_CONNECTIONS))
    auth = HubOAuth()
    if not auth.access_scopes:
        raise ValueError("JUPYTERHUB_OAUTH_ACCESS_SCOPES is empty: any user would be let in")
    private: dict[str, Any] = {"gate": gate, "now": now, "log": log, "disk": disk, "auth": auth}
    callback = urlsplit(auth.oauth_redirect_uri).path
    pages = web.Application(
        [
            (f"{prefix}api/?", _Open, {"seen": seen}),
            (callback, _Callback, {"auth": auth}),
            (f"{prefix}log", _RawLog, private),
            (f"{prefix}status", _StatusPage, private),
            (f"{prefix}?", _LogPage, private),
        ],
        cookie_secret=secrets.token_bytes(32),
        hub_auth=auth,
    )
    return Listener(pages, gate, ssl_options=tls, xheaders=True)
