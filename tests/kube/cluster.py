"""A cluster in a thread: API server, KAI's model and nodes, for tests that do not await."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kube.apiserver import ApiServer, api_server
from tests.kube.kubelet import Kubelet, Node
from tests.kube.real_engine import RealServer, running
from tests.kube.store import Json

STEP_S = 0.05


@dataclass
class Cluster:
    server: ApiServer | RealServer
    kubelet: Kubelet
    loop: asyncio.AbstractEventLoop
    folder: Path

    def do(self, change: Callable[[], Any]) -> Any:
        """Run a function between two steps of the cluster; return its result."""

        async def run() -> Any:
            return change()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()

    def pods(self, namespace: str = "") -> dict[str, Json]:
        """Return all pods by name."""
        found = self.do(lambda: list(self.server.store.all("pods", namespace)))
        return {pod["metadata"]["name"]: pod for pod in found}

    def kubeconfig(self, token: str = "t") -> Path:
        """Write a kubeconfig file for this cluster; return its path."""
        return self.server.kubeconfig(self.folder, token)


@contextlib.contextmanager
def running_cluster(
    folder: Path,
    nodes: Iterable[Node],
    images: Mapping[str, list[str]] | None = None,
) -> Iterator[Cluster]:
    """Yield a cluster with these nodes; its pods end with it."""
    made: list[Cluster] = []
    failed: list[BaseException] = []
    ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            server: ApiServer | RealServer
            if engine := running():
                server = engine.cluster()
            else:
                server = await stack.enter_async_context(api_server())
            kubelet = Kubelet(server.store, folder, nodes, images)
            made.append(Cluster(server, kubelet, asyncio.get_running_loop(), folder))
            ready.set()
            try:
                while not end.is_set():
                    server.kai.cycle()
                    kubelet.step()
                    await asyncio.sleep(STEP_S)
            finally:
                kubelet.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="cluster", daemon=True)
    thread.start()
    ready.wait()
    try:
        if made:
            yield made[0]
    finally:
        end.set()
        thread.join()
    if failed:
        raise failed[0]
