"""The mixin's part of the spawn page: the site's form with the size picker, and the options from both."""

from __future__ import annotations

import asyncio
import inspect
import re
from abc import abstractmethod
from collections.abc import Awaitable
from typing import Any

from jupyter_gpushare.errors import BrokerUnavailable, RequestError
from jupyter_gpushare.hub import options, picker
from jupyter_gpushare.hub.broker_access import BrokerAccess
from jupyter_gpushare.hub.refusals import JOB_NAME, refusal
from jupyter_gpushare.protocol.wire import Offers

# Names of servers that run jobs; their command comes from the broker.
JOB_SERVER_NAME = re.compile(r"j[a-z0-9]{10}-[0-9]+")
_MAX_PROJECTS_SHOWN = 8


class SpawnPage(BrokerAccess):
    """Form and options of a spawner; subclasses say how to ask the broker, and for which user."""

    offers_timeout_s: float

    @abstractmethod
    def _identity(self) -> tuple[str, str, list[str]]: ...

    async def get_options_form(self) -> str:
        """Return the site's own form, if any, and below it the size picker.

        Raises:
            SpawnException: the server has a name that only jobs have.
        """
        if JOB_SERVER_NAME.fullmatch(self._identity()[1]):
            raise refusal(JOB_NAME, "job_name", 409)
        site = await super().get_options_form()
        last = self.user_options.get(options.KEY)
        offers, trouble = await self._offers()
        return (site or "") + picker.render(
            offers, last=last if isinstance(last, dict) else {}, trouble=trouble
        )

    async def _offers(self) -> tuple[list[Offers], str]:
        """Return the broker's offers for each project of the user, or why there are none."""
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
            return [], picker.NO_OFFERS
        by_name = {each.project: each for each in (first, *more)}
        return [by_name[name] for name in first.projects if name in by_name] or [first], ""

    def run_options_from_form(self, form_data: dict[str, Any]) -> Any:
        """Return the user options for a submitted form, the site's and ours."""
        mine, others = options.split_form(form_data)
        return self._with_ours(super().run_options_from_form(others), mine)

    def options_from_query(self, query_data: dict[str, Any]) -> Any:
        """Return the user options for the parameters of a link, the site's and ours."""
        mine, others = options.split_form(query_data)
        return self._with_ours(super().options_from_query(others), mine)

    def _with_ours(self, site: Any, mine: dict[str, Any]) -> Any:
        """Return the site's options with ours; awaitable only where the site's function is."""
        if inspect.isawaitable(site):
            return self._awaited_with_ours(site, mine)
        found = dict(site or {})
        if mine:
            found[options.KEY] = options.from_form(mine)
        return found

    async def _awaited_with_ours(self, site: Awaitable[Any], mine: dict[str, Any]) -> Any:
        return self._with_ours(await site, mine)
