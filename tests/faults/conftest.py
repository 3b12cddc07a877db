"""`http`: a broker that listens, on a site in memory."""

from tests.broker.conftest import http

__all__ = ["http"]
