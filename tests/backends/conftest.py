"""`hubs_are_forks`: the Hub of these tests starts without its imports."""

from tests.hub.forked_hubs import hubs_are_forks

__all__ = ["hubs_are_forks"]
