"""The fixture `hubs_are_forks`: the Hub of these tests starts without the time for imports."""

from tests.hub.forked_hubs import hubs_are_forks

__all__ = ["hubs_are_forks"]
