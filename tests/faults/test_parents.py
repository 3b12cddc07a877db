"""Nothing that we start outlives its parent, however early in its start the parent ends.

Each parent is started often, and ended at moments that are spread evenly over one and a half times
the time that its children need to be up.  Then no process of it is left.

GPUSHARE_TEST_MOMENTS sets how many moments for each parent.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults import stand_in
from tests.gpu.machine import Client
from tests.ports import free_ports
from tests.simulator import Simulator
from tests.waiting import until

MOMENTS = int(os.environ.get("GPUSHARE_TEST_MOMENTS", "4"))
# So many parents start at once.
AT_ONCE = 12
# Of the time from the start of a parent until its children are up.
SPREAD = 1.5
SPEC = "1xH100-80GB,host=512GiB,checkpoint=any-uid"

# A child: it says that it is up, and stays.
CHILD = ["sh", "-c", "echo > $HOME/up; exec sleep 600"]
RUNNER = f"""
import os, signal
from jupyter_gpushare.job.children import Command
Command({CHILD}, cwd="/", env=os.environ, output=2)
signal.pause()
"""
BROKER = f"""
import asyncio
from jupyter_gpushare.notices import pipe
asyncio.run(pipe({tuple(CHILD)}, b"Subject: done"))
"""
# Starts a program that ends with it.
STARTER = (
    "import subprocess, sys; from jupyter_gpushare.parent import bound; subprocess.run(bound(sys.argv[1:]))"
)
# Takes a broker for gone sooner.
HELPER = """
import sys
from jupyter_gpushare.gpu.leases import registry
from jupyter_gpushare.gpu.service import helper
registry.SILENT_S = 0.5
sys.exit(helper.main(sys.argv[1:]))
"""
# In the place of JupyterHub, for `demo/hub.py`.
JUPYTERHUB = """
import os, pathlib, signal
pathlib.Path(os.environ["HOME"], "up").touch()
signal.pause()
"""


@dataclass(frozen=True)
class Parent:
    """How a parent is started in a folder, when its children are up, and which signals end it."""

    name: str
    start: Callable[[Path], tuple[list[str], dict[str, str]]]
    is_up: Callable[[Path], bool]
    signals: tuple[signal.Signals, ...] = (signal.SIGKILL,)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "HOME": str(folder), "PYTHONUNBUFFERED": "1", **more}


def python(program: str) -> Callable[[Path], tuple[list[str], dict[str, str]]]:
    return lambda folder: ([sys.executable, "-c", program], environment(folder))


def step(folder: Path) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "demo/step.py", "Doing it", str(folder / "step.log"), "--", *CHILD]
    return command, environment(folder)


def demo_environment(folder: Path, port: int) -> dict[str, str]:
    return environment(
        folder,
        GPUSHARE_DEMO_PORT=str(port),
        GPUSHARE_DEMO_DIR=str(folder / "demo"),
        GPUSHARE_SIMULATE=SPEC,
    )


def demo(folder: Path) -> tuple[list[str], dict[str, str]]:
    (folder / "jupyterhub.py").write_text(JUPYTERHUB)
    return [sys.executable, "demo/hub.py"], demo_environment(folder, free_ports(4)) | {
        "PYTHONPATH": str(folder)
    }


def whole_demo(folder: Path) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "demo/hub.py"], demo_environment(folder, free_ports(4))


def hub(folder: Path) -> tuple[list[str], dict[str, str]]:
    port = free_ports(4)
    (folder / "port").write_text(str(port))
    return [sys.executable, "-m", "tests.faults.stand_in", str(port)], demo_environment(folder, port)


def respawn(folder: Path) -> tuple[list[str], dict[str, str]]:
    port = free_ports(4)
    (folder / "port").write_text(str(port))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in demo_environment(folder, port).items():
            patch.setenv(name, value)
        (service,) = stand_in.configuration().JupyterHub.services
        return service["command"], stand_in.service_environment(service, port)


def helper(folder: Path) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "jupyter_gpushare.cli", "helper", "--state-dir", str(folder / "state")]
    return command, environment(folder, **Simulator(folder, SPEC).env())


def listens(folder: Path, beyond: int) -> bool:
    """Return whether the process of a port behind the Hub's listens."""
    with socket.socket() as peer:
        return peer.connect_ex(("127.0.0.1", int((folder / "port").read_text()) + beyond)) == 0


def has_tested(folder: Path) -> bool:
    """Return whether the helper's self-test has ended."""
    return "suspendable=" in (folder / "log").read_text()


def answers(folder: Path) -> bool:
    return listens(folder, 3) and has_tested(folder) and "answers at" in (folder / "log").read_text()


def says_so(folder: Path) -> bool:
    return (folder / "up").exists()


ENDS = (signal.SIGKILL, signal.SIGTERM)
LIGHT = (
    Parent("the broker of a mail command", python(BROKER), says_so),
    Parent("the runner of a job", python(RUNNER), says_so),
    Parent("a step of the set-up", step, says_so, ENDS),
    Parent("the demo's program", demo, says_so, ENDS),
    Parent("the helper", helper, has_tested),
)
# Beside each other: after its parent was killed a helper stays for 5 s (`registry.SILENT_S`).
HEAVY = (
    Parent("the parent of broker and helper", respawn, answers, ENDS),
    Parent("the Hub", hub, lambda folder: answers(folder) and listens(folder, 0)),
)
# The same with JupyterHub itself, for which the Hub above stands.
WHOLE = Parent(
    "make hub", whole_demo, lambda folder: "The demo is ready" in (folder / "log").read_text(), ENDS
)


def processes(folder: Path) -> dict[int, str]:
    """Return the command lines, by pid, of the living processes with this folder in words or variables."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            command = (each / "cmdline").read_bytes()
            if re.search(re.escape(bytes(folder)) + rb"[/\0]", command + (each / "environ").read_bytes()):
                found[int(each.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:200]
        except OSError:
            continue  # gone, or another user's
    return found


class Start:
    """One start of a parent."""

    def __init__(self, parent: Parent, folder: Path, number: signal.Signals, after_s: float) -> None:
        folder.mkdir()
        self.parent, self.folder, self.number = parent, folder, number
        command, environment = parent.start(folder)
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=stand_in.ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.began_at = time.monotonic()
        self.ends_at = self.began_at + after_s

    def end(self) -> None:
        """End the parent at its moment."""
        time.sleep(max(0.0, self.ends_at - time.monotonic()))
        self.process.send_signal(self.number)

    @property
    def lasted_s(self) -> float:
        """From the start of the parent to its moment."""
        return self.ends_at - self.began_at

    def is_over(self) -> bool:
        return self.process.poll() is not None and not processes(self.folder)


def end_when_up(parents: Sequence[Parent], folder: Path) -> list[tuple[Start, float]]:
    """Start each parent once; return the starts, ended, and after how many seconds their children were up."""
    starts = [Start(parent, folder / f"first-{n}", signal.SIGKILL, 0.0) for n, parent in enumerate(parents)]
    up_s: dict[Start, float] = {}

    def all_up() -> bool:
        for parent, start in zip(parents, starts, strict=True):
            if start not in up_s and parent.is_up(start.folder):
                up_s[start] = time.monotonic() - start.began_at
        return len(up_s) == len(starts)

    until(all_up, "the children are up", log=starts[0].folder / "log")
    for each in starts:
        each.end()
    return [(each, up_s[each]) for each in starts]


def see_all_end(starts: Sequence[Start]) -> None:
    """Wait until nothing is left of any; what is left then is named and killed."""
    try:
        until(lambda: all(each.is_over() for each in starts))
    except AssertionError:
        left = {start: processes(start.folder) for start in starts}
        for pid in (pid for found in left.values() for pid in found):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        lines = [
            f"{each.parent.name}, ended after {each.lasted_s:.2f} s: {left[each]}"
            for each in left
            if left[each]
        ]
        pytest.fail("\n".join(["what outlived its parent:", *lines]))


@pytest.mark.long_form
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "parents",
    [*((each,) for each in LIGHT), HEAVY, pytest.param((WHOLE,), marks=pytest.mark.long)],
    ids=lambda group: group[-1].name,
)
def test_nothing_outlives_a_parent_that_ends_early(parents: tuple[Parent, ...], tmp_path: Path) -> None:
    firsts = end_when_up(parents, tmp_path)
    over = [start for start, _ in firsts]
    wanted = [
        (n * SPREAD * up_s / max(1, MOMENTS - 1), parent, parent.signals[n % len(parent.signals)])
        for parent, (_, up_s) in zip(parents, firsts, strict=True)
        for n in range(MOMENTS)
    ]
    batches = -(-len(wanted) // AT_ONCE)
    for batch in range(batches):
        running = [
            Start(parent, tmp_path / f"{batch}-{n}", number, after_s)
            for n, (after_s, parent, number) in enumerate(wanted[batch::batches])
        ]
        for each in sorted(running, key=lambda start: start.ends_at):
            each.end()
        over += running
        see_all_end(over)
    print("; ".join(f"{start.parent.name}: up after {up_s:.1f} s" for start, up_s in firsts))


def test_a_helper_without_its_parent_stays_while_a_process_of_a_lease_lives(tmp_path: Path) -> None:
    machine, state = Simulator(tmp_path, SPEC), tmp_path / "state"
    arguments = [sys.executable, "-c", HELPER, "--state-dir", str(state), "--sample-s", "0.2"]

    def ask(verb: str, **fields: Any) -> dict[str, Any]:
        with contextlib.closing(Client(state / "helper.sock")) as client:
            return client.ask(verb, **fields)

    with subprocess.Popen([sys.executable, "-c", STARTER, *arguments], env=machine.env()) as starter:
        until((state / "helper.sock").exists, "the helper listens", process=starter)
        limits = {machine.uuid(0): 1 << 30}
        lease = ask("set_limit", lease="ada-1", uid=os.geteuid(), limits=limits)["directory"]
        variables = {"GPUSHARE_LEASE": "ada-1", "GPUSHARE_LEASE_DIR": lease}
        with subprocess.Popen(["sleep", "600"], env=machine.env(**variables)) as session:
            began_at = ask("hello")["now"]
            until(lambda: ask("sample")["at"] > began_at, "a sample shows the session")
            starter.kill()
            gone_at = ask("hello")["now"]
            # It looks every second; nothing that is asked without an epoch is asked by a broker.
            until(lambda: ask("hello")["now"] > gone_at + 3, "it has looked and stayed")
            session.kill()
    until(lambda: not processes(tmp_path), "the helper ends")
