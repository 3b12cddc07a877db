"""How kernels of a real kernel manager end, and when it says that it will end them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta

import pytest
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from traitlets.config import Config

from jupyter_gpushare.server.ends import KEPT_S, Ended, Ends
from tests.waiting import PATIENCE_S

TIMEOUT_S = 3600


class Live:
    """A kernel manager with one kernel, and what the extension sees of it."""

    def __init__(self, manager: AsyncMappingKernelManager, id_: str) -> None:
        self.manager, self.id = manager, id_
        self.now, self.wall_ahead_s = 1_000.0, 0.0
        self.ends = Ends(lambda: self.now, lambda: datetime.now(UTC) + timedelta(seconds=self.wall_ahead_s))
        assert self.sample() == ()

    def sample(self) -> tuple[Ended, ...]:
        return self.ends.sample(self.manager)

    def ends_in_s(self) -> float | None:
        self.sample()
        return self.ends.ends_in_s().get(self.id)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.02)

    async def ended(self) -> Ended:
        await self.until(self.sample)
        (end,) = self.sample()
        assert (end.id, end.at) == (self.id, self.now)
        return end

    def pid(self) -> int:
        """The process of the kernel; 0: it has none just now."""
        process = self.manager.get_kernel(self.id).provisioner.process
        return 0 if process is None else int(process.pid)


@pytest.fixture
async def live(monkeypatch, tmp_path) -> AsyncIterator[Live]:
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.KernelRestarter.time_to_dead = 0.1
    config.MappingKernelManager.cull_idle_timeout = TIMEOUT_S
    manager = AsyncMappingKernelManager(config=config, connection_dir=str(tmp_path))
    id_ = await manager.start_kernel(kernel_name="python3")
    client = manager.get_kernel(id_).client()
    client.start_channels()
    await client.wait_for_ready(PATIENCE_S)
    client.stop_channels()
    live = Live(manager, id_)
    yield live
    await live.until(lambda: all(manager.get_kernel(id_).ready.done() for id_ in manager.list_kernel_ids()))
    await manager.shutdown_all(now=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_process_that_died_is_told_with_its_signal_though_its_kernel_is_started_again(live, number):
    killed = live.pid()
    os.kill(killed, number)
    assert await live.ended() == Ended(live.id, "died", -number, live.now)
    await live.until(lambda: live.pid() != killed)
    assert len(live.sample()) == 1


async def test_a_kernel_that_its_user_restarts_or_shuts_down_is_told_so(live):
    await live.manager.restart_kernel(live.id)
    assert (await live.ended()).how == "restarted"
    live.now += KEPT_S + 1
    assert live.sample() == ()  # told long ago
    await live.manager.shutdown_kernel(live.id)
    assert (await live.ended()).how == "shut_down"


async def test_a_kernel_that_idled_beyond_the_setting_is_told_by_it(live):
    live.wall_ahead_s = TIMEOUT_S + 60
    live.sample()
    live.manager.cull_idle_timeout = 1
    live.manager.get_kernel(live.id).execution_state = "idle"
    live.manager.get_kernel(live.id).last_activity -= timedelta(hours=1)
    await live.manager.cull_kernel_if_idle(live.id)
    assert (await live.ended()).how == "idle"


async def test_a_kernel_without_restarts_is_told_when_it_is_gone(live):
    live.manager.get_kernel(live.id).stop_restarter()
    os.kill(live.pid(), signal.SIGKILL)
    await live.until(lambda: live.manager.get_kernel(live.id).provisioner.process.poll() is not None)
    live.sample()
    await live.manager.shutdown_kernel(live.id, now=True)
    assert await live.ended() == Ended(live.id, "died", -signal.SIGKILL, live.now)


async def test_an_idle_kernel_without_a_page_has_an_end_and_others_have_none(live):
    left_s = live.ends_in_s()
    assert left_s is not None
    assert TIMEOUT_S - 600 < left_s <= TIMEOUT_S
    live.manager.notify_connect(live.id)
    assert live.ends_in_s() is None
    live.manager.cull_connected = True
    assert live.ends_in_s() is not None
    kernel = live.manager.get_kernel(live.id)
    kernel.execution_state = "busy"
    assert live.ends_in_s() is None
    live.manager.cull_busy = True
    assert live.ends_in_s() is not None
    kernel.kernel_spec.metadata["cull_idle_timeout"] = 60
    assert live.ends_in_s() <= 60
    live.manager.cull_idle_timeout = 0
    assert live.ends_in_s() is None


def test_kernel_managers_of_another_kind_end_nothing():
    class Kernel:
        """Behind a gateway, or of a provisioner without a process."""

    class Manager:
        def list_kernel_ids(self) -> list[str]:
            return ["a"]

        def get_kernel(self, _: str) -> Kernel:
            return Kernel()

    ends = Ends()
    assert ends.sample(Manager()) == ()
    assert ends.sample(Manager()) == ()
    assert ends.ends_in_s() == {}
