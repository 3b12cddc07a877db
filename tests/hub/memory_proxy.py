"""A proxy for the tests' Hub that only stores its routes."""

from jupyterhub.proxy import Proxy


class MemoryProxy(Proxy):
    should_start = False

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._routes = {}

    async def add_route(self, routespec, target, data):
        self._routes[routespec] = {"routespec": routespec, "target": target, "data": data}

    async def delete_route(self, routespec):
        self._routes.pop(routespec, None)

    async def get_all_routes(self):
        return dict(self._routes)
