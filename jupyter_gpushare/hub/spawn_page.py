"""The spawn page: the site's form with the size picker below it, and the options from both."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable
from typing import Any
from urllib.parse import unquote

from jupyter_gpushare.errors import BrokerUnavailable, InvalidRequest, NotSetUp, RequestError, TooMany
from jupyter_gpushare.hub import options, picker
from jupyter_gpushare.hub.broker_access import BrokerAccess
from jupyter_gpushare.hub.refusals import JOB_NAME, refusal
from jupyter_gpushare.protocol.wire import JOB_SERVER_NAME, Offers, SpawnWait

_MAX_PROJECTS_SHOWN = 8
# The script of an open page sends `_OFFERS`, `_LEAVE`, or the options of the size that it waits for (JSON,
# percent-encoded).
_LIVE_HEADER = "X-GPUShare-Live"
_OFFERS, _LEAVE = "offers", "leave"
_NO_ANSWER = "The GPU service does not answer just now; your place is asked for again."


class SpawnPage(BrokerAccess):
    """The form and the options of a spawner."""

    offers_timeout_s: float

    async def get_options_form(self) -> str:
        """Return the site's own form, if any, and below it the size picker.

        Raises:
            SpawnException: the name of the server is reserved for jobs.
        """
        if JOB_SERVER_NAME.fullmatch(self._identity()[1]):
            raise refusal(JOB_NAME, "job_name", 409)
        live = self._take_live()
        site = "" if live else await super().get_options_form()
        last = self.user_options.get(options.KEY)
        place = await self._place_in_queue(live) if live not in ("", _OFFERS) else None
        offers, trouble = await self._offers()
        return (site or "") + picker.render(
            offers, last=last if isinstance(last, dict) else {}, trouble=trouble, place=place
        )

    def _take_live(self) -> str:
        """Return and remove the request of an open page's script; empty if the page is being loaded."""
        # `handler` is that of the last page, also when the Hub shows a failed form again.
        handler = getattr(self, "handler", None)
        return "" if handler is None else str(handler.request.headers.pop(_LIVE_HEADER, ""))

    async def _place_in_queue(self, live: str) -> picker.WaitingPlace | None:
        """Take or keep this server's place in the queue of sessions, or give it up and return None."""
        user = self._identity()[0]
        try:
            wanted = None if live == _LEAVE else options.read({options.KEY: _decoded(live)})
            body = self._request(wanted)
            async with asyncio.timeout(self.offers_timeout_s):
                client = self._broker_client()
                if wanted is None:
                    await self._answer(client.post("spawner/wait", body, type(None), repeatable=True))
                    return None
                found = await self._answer(client.post("spawner/wait", body, SpawnWait, repeatable=True))
        except (RequestError, BrokerUnavailable, TimeoutError) as error:
            if isinstance(error, RequestError) and not _passes(error):
                return picker.WaitingPlace(state="refused", sentence=str(error))
            self.log.warning("user=%s waits without broker: %s", user, str(error) or "no answer in time")
            return picker.WaitingPlace(state="unknown", sentence=_NO_ANSWER)
        return picker.WaitingPlace(state=found.state, sentence=found.sentence)

    async def _offers(self) -> tuple[list[Offers], str]:
        """Return the broker's offers for each project of the user, and the reason if there are none."""
        user, server, groups = self._identity()
        known = {"user": user, "group": groups, "server": server}
        try:
            async with asyncio.timeout(self.offers_timeout_s):
                client = self._broker_client()
                first = await self._answer(client.get("spawner/offers", Offers, params=known))
                others = [p for p in first.projects[:_MAX_PROJECTS_SHOWN] if p != first.project]
                more = await asyncio.gather(
                    *(client.get("spawner/offers", Offers, params={**known, "project": p}) for p in others)
                )
        except RequestError as error:
            return [], str(error)
        except (BrokerUnavailable, TimeoutError) as error:
            self.log.warning("user=%s spawn page without offers: %s", user, str(error) or "no answer in time")
            return [], picker.NOT_SET_UP if isinstance(error, NotSetUp) else picker.NO_OFFERS
        by_name = {each.project: each for each in (first, *more)}
        return [by_name[name] for name in first.projects if name in by_name] or [first], ""

    def run_options_from_form(self, form_data: dict[str, Any]) -> Any:
        """Return the site's options and ours for a submitted form."""
        mine, others = options.split_form(form_data)
        return self._with_ours(super().run_options_from_form(others), mine)

    def options_from_query(self, query_data: dict[str, Any]) -> Any:
        """Return the site's options and ours for the parameters of a link."""
        mine, others = options.split_form(query_data)
        return self._with_ours(super().options_from_query(others), mine)

    def _with_ours(self, site: Any, mine: dict[str, Any]) -> Any:
        """Return the site's options with ours; an awaitable if the site's function returned one."""
        if inspect.isawaitable(site):
            return self._awaited_with_ours(site, mine)
        found = dict(site or {})
        if mine:
            found[options.KEY] = options.from_form(mine)
        return found

    async def _awaited_with_ours(self, site: Awaitable[Any], mine: dict[str, Any]) -> Any:
        return self._with_ours(await site, mine)


def _passes(error: RequestError) -> bool:
    """Return whether the same request may succeed soon, so that a waiting page should retry it."""
    is_rate = isinstance(error, TooMany) and error.reason != "queue_full"
    return is_rate or error.reason == "devices_unknown" or error.status >= 500


def _decoded(live: str) -> Any:
    try:
        return json.loads(unquote(live))
    except (ValueError, RecursionError):
        raise InvalidRequest("this is not a size to wait for: reload the page") from None
