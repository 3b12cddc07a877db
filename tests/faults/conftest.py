"""`http`: a broker that listens, on a site in memory; `postgresql`: a server that makes databases;
`hubs_are_forks`: Hubs start without their imports.
"""

from tests.broker.conftest import http, postgresql
from tests.hub.forked_hubs import hubs_are_forks

__all__ = ["http", "hubs_are_forks", "postgresql"]
