"""A process that slept has ended: the owner reads in *What happened* what it lost, when, and to what."""

from __future__ import annotations

import asyncio
import signal
from datetime import datetime

import pytest

from jupyter_gpushare.backends.base import HubError, HubServer, ServerKey
from jupyter_gpushare.messages import english
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import Phase, ProcessSample
from jupyter_gpushare.wall_clock import before
from tests.broker.brokers import Broker
from tests.broker.disks import SmallDisk
from tests.broker.machine import GB, Held, Program
from tests.broker.site import Site
from tests.broker.virtual_time import until

KERNEL = "0b1e"
CULLER = ["/usr/bin/python3", "-m", "jupyterhub_idle_culler", "--timeout=3600"]


def process(pid: int, kernel: str = "") -> ProcessSample:
    return ProcessSample(pid=pid, started_at=1.0, name="python3", used_bytes=0, calls=-1, kernel=kernel)


async def asleep(site: Site, *processes: ProcessSample) -> Held:
    """Return ada's session, asleep with 10 GB in each of these processes, which is measured."""
    ada = await site.session("ada", "1/2")
    ada.processes = processes
    ada.used = {next(iter(ada.limits)): 10 * GB * len(processes)}
    await site.running("bo", "2")
    await until(lambda: ada.phase is Phase.SUSPENDED)
    await asyncio.sleep(2)
    return ada


def gone(ada: Held, *processes: ProcessSample) -> None:
    """End these processes, and what they had in RAM."""
    ada.processes = tuple(each for each in ada.processes if each not in processes)
    ada.saved = {uuid: 10 * GB * len(ada.processes) for uuid in ada.saved}


def losses(site: Site) -> list[str]:
    """What the owner of the session reads of losses."""
    assert site.broker is not None
    events = site.broker.views.status("ada", ("vision",), admin=False).events
    return [english(each.sentence_texts) for each in events if each.action == "saved-lost"]


async def ends(broker: Broker, how: str, code: int | None = None, kernel: str = KERNEL) -> None:
    end = wire.KernelEnd(id=kernel, how=how, ago_s=0.5, name="train.ipynb", code=code)  # type: ignore[arg-type]
    await broker.own_sessions.activity("ada", "", wire.ActivityReport(kernels=[], ended=[end]))


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (
            "idle",
            None,
            "train.ipynb was shut down after it had been idle for longer than cull_idle_timeout allows.",
        ),
        ("shut_down", None, "its kernel train.ipynb was shut down on request."),
        ("restarted", None, "its kernel train.ipynb was restarted."),
        ("died", -signal.SIGKILL, "its kernel train.ipynb was killed (SIGKILL), as happens when memory runs"),
        ("died", -signal.SIGSEGV, "its kernel train.ipynb was ended by SIGSEGV."),
        ("died", 3, "its kernel train.ipynb ended with exit code 3."),
        ("died", None, "its kernel train.ipynb died."),
    ],
)
async def test_a_kernel_that_slept_and_ended_is_told_with_what_ended_it_and_when(
    site: Site, broker: Broker, how: str, code: int | None, said: str
) -> None:
    one, other = process(1, KERNEL), process(2, "other")
    ada = await asleep(site, one, other)
    gone(ada, one)
    at = datetime.fromisoformat(site.wall()).astimezone()
    await ends(broker, how, code)
    await asyncio.sleep(3)
    (told,) = losses(site)
    assert told.startswith("Your session (1/2 GPU) lost 9.3 GiB of saved GPU memory at ")
    assert f"{at:%H:%M}: " in told
    assert said in told
    await asyncio.sleep(30)
    assert len(losses(site)) == 1
    assert broker.registry.by_handle(ada.handle).lease.saved_bytes == 10 * GB


async def test_several_processes_that_end_at_once_are_one_event(site: Site, broker: Broker) -> None:
    kernel, script = process(1, KERNEL), process(7)
    ada = await asleep(site, kernel, script)
    gone(ada, kernel, script)
    await ends(broker, "restarted")
    await asyncio.sleep(15)
    (told,) = losses(site)
    assert told.endswith("its kernel train.ipynb was restarted; its process 7 (python3) ended.")
    assert "lost 19 GiB" in told


async def test_a_kernel_that_ends_as_soon_as_it_sleeps_is_told_too(site: Site, broker: Broker) -> None:
    kernel = process(1, KERNEL)
    ada = await site.session("ada", "1/2")
    ada.processes = (kernel, process(2))
    ada.used = dict.fromkeys(ada.limits, 20 * GB)
    site.move_s = 0.01  # no sample in between
    await site.submit("bo", "2")
    await until(lambda: ada.phase is Phase.SUSPENDED, 200)
    gone(ada, kernel)
    await ends(broker, "died", -signal.SIGKILL)
    await asyncio.sleep(5)
    (told,) = losses(site)
    assert "its kernel train.ipynb was killed" in told


async def test_a_process_that_nobody_explains_is_told_by_its_number(site: Site, broker: Broker) -> None:
    script = process(7)
    ada = await asleep(site, process(1, KERNEL), script)
    gone(ada, script)
    await asyncio.sleep(5)
    assert not losses(site)  # its server may say more
    await asyncio.sleep(10)
    (told,) = losses(site)
    assert told.endswith("its process 7 (python3) ended.")


async def test_an_older_end_of_a_kernel_explains_nothing(site: Site, broker: Broker) -> None:
    kernel = process(1, KERNEL)
    ada = await asleep(site, kernel)
    await ends(broker, "restarted")
    await asyncio.sleep(60)
    gone(ada, kernel)
    await asyncio.sleep(15)
    (told,) = losses(site)
    assert told.endswith("its process 1 (python3) ended.")


async def test_a_broker_that_restarts_finds_a_loss_that_was_not_told(site: Site, broker: Broker) -> None:
    ada = await asleep(site, process(1, KERNEL), process(2))
    await broker.end()
    gone(ada, *ada.processes[:1])
    await site.start_broker()
    await asyncio.sleep(15)
    (told,) = losses(site)
    assert "lost 9.3 GiB of saved GPU memory" in told
    assert told.endswith(" or earlier: one of its processes ended.")


async def test_a_session_that_wakes_says_what_it_lost_before(site: Site, broker: Broker) -> None:
    kernel = process(1, KERNEL)
    ada = await asleep(site, kernel, process(2))
    gone(ada, kernel)
    await asyncio.sleep(2)
    await site.gpu_cell(ada)
    await asyncio.sleep(15)
    (told,) = losses(site)
    assert "lost 9.3 GiB" in told
    assert session(broker).saved_lost
    await site.end_session("ada", by_hub=True)
    await asyncio.sleep(5)
    assert len(losses(site)) == 1


async def test_a_loss_that_no_measurement_saw_is_told_when_the_session_wakes(
    site: Site, broker: Broker
) -> None:
    kernel = process(1, KERNEL)
    ada = await asleep(site, kernel, process(2))
    site.move_s = 0.01
    gone(ada, kernel)
    await ends(broker, "died", -signal.SIGKILL)
    await site.gpu_cell(ada)
    await asyncio.sleep(15)
    (told,) = losses(site)
    assert "lost 9.3 GiB" in told
    assert "train.ipynb was killed" in told


@pytest.mark.parametrize("is_broker_away", [True, False])
async def test_a_session_that_woke_while_nobody_could_record_it_has_lost_nothing(
    site: Site, broker: Broker, is_broker_away: bool
) -> None:
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=Program(work_s=5))
    await until(lambda: broker.state(ada.handle) == "suspended", 120)
    await until(lambda: broker.job(job).result, 120)
    if is_broker_away:
        await broker.end()
    else:
        site.helper_silent = True
        await asyncio.sleep(10)
    site.resume_unattended(ada)
    if is_broker_away:
        await site.start_broker()
    site.helper_silent = False
    await asyncio.sleep(30)
    assert site.broker is not None
    assert site.broker.state(ada.handle) == "running"
    assert not losses(site)


async def test_a_loss_on_a_full_disk_is_told_when_there_is_room(
    site: Site, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = process(1, KERNEL)
    ada = await asleep(site, kernel, process(2))
    gone(ada, kernel)
    await asyncio.sleep(2)
    disk = SmallDisk(broker.store)
    disk.fill_all()
    await asyncio.sleep(60)
    assert not losses(site)
    assert "measuring" not in caplog.text  # other leases are looked at all the same
    disk.clear()
    await asyncio.sleep(60)
    assert len(losses(site)) == 1


@pytest.mark.parametrize(
    ("by_hub", "idle_s", "said"),
    [
        (True, 60, "the Hub stopped its server."),
        (
            True,
            3700,
            "the Hub stopped its server, idle longer than its service cull allows.",
        ),
        (False, 3700, "its server ended without a request of the Hub."),
        (None, 60, "its server ended."),
    ],
)
async def test_a_server_that_ended_while_its_session_slept_is_told_with_who_ended_it(
    site: Site, by_hub: bool | None, idle_s: float, said: str
) -> None:
    site.services = {"gpushare": ["gpushare", "broker"], "cull": CULLER}
    await site.start_broker()
    await asleep(site, process(1, KERNEL), process(2))
    site.active[ServerKey("ada", "")] = HubServer(last_activity=before(site.wall(), seconds=idle_s))
    await asyncio.sleep(61)
    await site.end_session("ada", by_hub=by_hub)
    await asyncio.sleep(5)
    (told,) = losses(site)
    assert "lost 19 GiB of saved GPU memory" in told
    assert told.endswith(said)


async def test_a_server_that_takes_its_kernels_with_it_is_one_loss(site: Site, broker: Broker) -> None:
    ada = await asleep(site, process(1, KERNEL))
    gone(ada, *ada.processes)
    ada.alive = False
    await asyncio.sleep(20)
    assert not losses(site)  # the Hub has not said what became of the server
    await site.end_session("ada", by_hub=False)
    await asyncio.sleep(5)
    (told,) = losses(site)
    assert told.endswith("its server ended without a request of the Hub.")


async def test_a_session_that_ends_awake_has_lost_nothing(site: Site, broker: Broker) -> None:
    await site.session("ada", "1/2")
    await asyncio.sleep(3)
    await site.end_session("ada", by_hub=True)
    await asyncio.sleep(5)
    assert not losses(site)


# ---- when the site ends sleepers ---------------------------------------------


def session(broker: Broker) -> wire.LeaseStatus:
    (lease,) = [each for each in broker.views.leases("ada") if not each.job]
    return lease


def sentence(broker: Broker) -> str:
    return english(session(broker).sentence_texts)


async def test_a_sleeper_reads_when_a_setting_of_its_server_may_end_its_kernel(
    site: Site, broker: Broker
) -> None:
    await asleep(site, process(1, KERNEL))
    assert "your variables are safe" in sentence(broker)
    await site.reports("ada", wire.KernelActivity(id="other", busy=False, idle_s=5, ends_in_s=60.0))
    assert "your variables are safe" in sentence(broker)  # that kernel holds nothing
    await site.reports("ada", wire.KernelActivity(id=KERNEL, busy=False, idle_s=5, ends_in_s=7200.0))
    at = datetime.fromisoformat(before(site.wall(), hours=-2)).astimezone()
    said = sentence(broker)
    assert "safe" not in said
    assert "If it stays idle, its server shuts its kernel down after " in said
    assert f"{at:%H:%M} (cull_idle_timeout), and the variables are lost." in said


async def test_a_time_that_has_passed_and_one_that_is_not_known_are_not_named(site: Site) -> None:
    site.services = {"cull": ["sh", "-c", "exec jupyterhub-idle-culler --timeout=$T"]}
    broker = await site.start_broker()
    await asleep(site, process(1, KERNEL))
    await asyncio.sleep(61)
    assert "(a service of the Hub) stops its server at some point, and" in sentence(broker)
    assert (session(broker).ends_at, session(broker).ends_by) == (None, "cull")
    await site.reports("ada", wire.KernelActivity(id=KERNEL, busy=False, idle_s=5, ends_in_s=-3.0))
    assert "its server shuts its kernel down at any moment (cull_idle_timeout), and" in sentence(broker)


async def test_a_worker_without_a_kernel_in_its_command_line_may_be_of_any(
    site: Site, broker: Broker
) -> None:
    await asleep(site, process(1))
    await site.reports("ada", wire.KernelActivity(id=KERNEL, busy=False, idle_s=5, ends_in_s=60.0))
    assert "safe" not in sentence(broker)


async def test_a_sleeper_reads_when_a_culler_of_the_hub_may_stop_its_server(site: Site) -> None:
    site.services = {"cull": CULLER}
    broker = await site.start_broker()
    await asleep(site, process(1, KERNEL))
    used_at = before(site.wall(), seconds=600)
    site.active[ServerKey("ada", "")] = HubServer(last_activity=used_at)
    await asyncio.sleep(61)
    at = datetime.fromisoformat(before(used_at, hours=-1)).astimezone()
    said = sentence(broker)
    assert "If it stays idle, cull (a service of the Hub) stops its server after " in said
    assert f"{at:%H:%M}, and the variables are lost." in said
    assert "safe" not in said
    assert (session(broker).ends_at, session(broker).ends_by) == (before(used_at, hours=-1), "cull")


async def test_a_hub_that_does_not_show_its_services_is_no_fault(site: Site, broker: Broker) -> None:
    async def refuse() -> dict[str, list[str]]:
        raise HubError("the Hub did not list its services: not authorized with current scopes")

    broker.hub.services = refuse  # type: ignore[method-assign]
    await asleep(site, process(1, KERNEL))
    await asyncio.sleep(61)
    assert "your variables are safe" in sentence(broker)
    assert not broker.loop.faults.sentences()
