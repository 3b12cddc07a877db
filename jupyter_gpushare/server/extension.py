"""Lifecycle of the server extension: two tasks and one connection to the broker.

The Hub's spawner configures it by environment variables: GPUSHARE_API_URL,
JUPYTERHUB_API_TOKEN (identity of this server), JUPYTERHUB_SERVER_NAME.  Without the
first two the extension logs that once and stays inactive.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jupyter_server.extension.application import ExtensionApp

from jupyter_gpushare.channel import CERTIFICATE_VARIABLE
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.server.activity import Reporter, Sample, notebooks_of, take_sample
from jupyter_gpushare.server.base import Broker
from jupyter_gpushare.server.ends import Ends
from jupyter_gpushare.server.handlers import routes
from jupyter_gpushare.server.kernels import Kernels
from jupyter_gpushare.server.watch import EVENTS_DIR, Watch

RESTART_S = 60
CANCEL_AGAIN_S = 0.5


class GpuShareExtension(ExtensionApp):
    """The server extension; it has no options."""

    name = "jupyter_gpushare"
    load_other_extensions = True

    serverapp: Any

    def initialize_handlers(self) -> None:
        """Register events and routes, and connect to the broker that the environment names."""
        self._tasks: list[asyncio.Task[None]] = []
        self._broker: Broker | None = None
        self._kernels, self._ends = Kernels(), Ends()
        for path in sorted(EVENTS_DIR.glob("*.yaml")):
            self.serverapp.event_logger.register_event_schema(path)
        url, token = os.environ.get("GPUSHARE_API_URL", ""), os.environ.get("JUPYTERHUB_API_TOKEN", "")
        if url and token:
            # The callers retry by themselves.
            certificate = os.environ.get(CERTIFICATE_VARIABLE, "")
            client = BrokerClient(url, token, certificate=certificate, retry_s=0.0)
            server = os.environ.get("JUPYTERHUB_SERVER_NAME", "")
            self._broker = Broker(client, Watch(client, server, self._emit, self.log), server)
        else:
            self.log.info("gpushare: no GPU broker for this server (GPUSHARE_API_URL is not set)")
        self.handlers.extend(routes(self._broker))

    async def _start_jupyter_server_extension(self, serverapp: Any) -> None:
        """Start both tasks; the event loop runs now."""
        if self._broker is None:
            return
        reporter = Reporter(self._broker.client, self._sample, self._notebooks, self.log)
        for work in (reporter.run, self._broker.watch.run):
            self._tasks.append(asyncio.create_task(self._keep_running(work)))

    async def stop_extension(self) -> None:
        """End both tasks and close the connection.

        A cancellation is repeated because a library may lose one that arrives together with an answer, as
        `asyncio.wait_for` of Python 3.11 does.
        """
        while running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
        self._tasks.clear()
        self._kernels.close()
        if self._broker is not None:
            await self._broker.watch.stop()
            await self._broker.client.close()

    async def _keep_running(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                # An unusual kernel or session manager may raise anything, and must not harm the server.
                self.log.exception("gpushare: trying again in %d s", RESTART_S)
            await asyncio.sleep(RESTART_S)

    def _sample(self) -> Sample:
        terminals = self.serverapp.web_app.settings.get("terminal_manager")
        return take_sample(self.serverapp.kernel_manager, terminals, self._kernels, self._ends)

    async def _notebooks(self) -> Mapping[str, str]:
        return await notebooks_of(self.serverapp.session_manager)

    def _emit(self, schema: str, data: dict[str, Any]) -> None:
        self.serverapp.event_logger.emit(schema_id=schema, data=data)
