"""The fixtures `site`, `broker`, `http` and `postgresql` of `tests/broker`, and `hubs_are_forks`: Hubs start
without the time for imports.
"""

from tests.broker.conftest import broker, http, postgresql, pytest_asyncio_loop_factories, site
from tests.hub.forked_hubs import hubs_are_forks

__all__ = ["broker", "http", "hubs_are_forks", "postgresql", "pytest_asyncio_loop_factories", "site"]
