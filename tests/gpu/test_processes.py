"""Which processes belong to a lease, and that signals hit no other."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu import processes as found_by
from jupyter_gpushare.gpu.processes import Processes, leader, start_of
from tests.gpu.machine import GIB, PATIENCE_S, Machine, until

# Found among all processes of this machine: no other run may have the same.
LEASE = f"ada{uuid.uuid4().hex}"
OWNERS = {LEASE: os.geteuid()}
CARRIES = {**os.environ, "GPUSHARE_LEASE": LEASE}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    found.close()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []
    yield children
    for child in children:
        child.kill()
        child.communicate()


def start(
    started: list[subprocess.Popen[str]], script: str = "input()", env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        env=CARRIES if env is None else env,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    started.append(child)
    return child


def pids(processes: Processes, owners: dict[str, int] = OWNERS) -> set[int]:
    return {process.pid for process in processes.scan(owners)[LEASE]}


CLEARED = (
    "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    " env={}); print(c.pid, flush=True); input()"
)


def test_a_process_belongs_by_its_environment(
    processes: Processes, started: list[subprocess.Popen[str]]
) -> None:
    child, other = start(started), start(started, env=dict(os.environ))
    until(lambda: child.pid in pids(processes), "the child is found")
    assert other.pid not in pids(processes)
    assert os.getpid() not in pids(processes)


def test_a_lease_of_the_same_name_of_another_helper_is_another(
    processes: Processes, started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    mine = start(started, env={**CARRIES, "GPUSHARE_LEASE_DIR": f"{tmp_path}/./{LEASE}/"})
    theirs = start(started, env={**CARRIES, "GPUSHARE_LEASE_DIR": f"/elsewhere/{LEASE}"})
    until(lambda: mine.pid in pids(processes), "it is found")
    assert theirs.pid not in pids(processes)


def test_the_innermost_cgroup_names_the_lease(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = "0::/system.slice/gpushare-helper.service/gpushare-ada/kernels\n"
    monkeypatch.setattr(found_by, "_bytes", lambda name, most: path.encode() if "cgroup" in name else b"")
    assert found_by._named_by(1, frozenset({tmp_path})) == "ada"


def test_a_child_that_cleared_its_environment_still_belongs(
    processes: Processes, started: list[subprocess.Popen[str]]
) -> None:
    parent = start(started, CLEARED)
    assert parent.stdout
    child = int(parent.stdout.readline())
    until(lambda: {parent.pid, child} <= pids(processes), "both are found")
    parent.kill()
    parent.wait()
    # Its parent is gone, and it names no lease: it is remembered.
    assert child in pids(processes)
    assert parent.pid not in pids(processes)
    (left,) = processes.scan(OWNERS)[LEASE]
    assert processes.signal(left.key, signal.SIGKILL)
    until(lambda: not pids(processes), "it ended")


def test_another_users_process_never_belongs(
    processes: Processes, started: list[subprocess.Popen[str]]
) -> None:
    child = start(started)
    until(lambda: child.pid in pids(processes), "it is found for its own user")
    assert pids(processes, {LEASE: os.geteuid() + 1}) == set()


def test_a_zombie_does_not_belong(processes: Processes, started: list[subprocess.Popen[str]]) -> None:
    child = start(started)
    until(lambda: child.pid in pids(processes), "the child is found")
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: processes.wait_exit(1.0), "the exit is noticed")
    assert child.pid not in pids(processes)
    assert not processes.alive((child.pid, start_of(child.pid)))


def test_the_leader_is_the_oldest_that_carries_the_lease_with_a_parent_that_does_not(
    processes: Processes, started: list[subprocess.Popen[str]]
) -> None:
    spawns = (
        "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'input()'],"
        " stdin=subprocess.PIPE); print(c.pid, flush=True); input()"
    )
    parent = start(started, spawns)
    assert parent.stdout
    child = int(parent.stdout.readline())
    until(lambda: {parent.pid, child} <= pids(processes), "both are found")
    first = leader(processes.scan(OWNERS)[LEASE])
    assert first
    assert first.pid == parent.pid
    assert leader(()) is None


def test_a_signal_to_a_pid_that_is_another_process_by_now_goes_nowhere(
    processes: Processes, started: list[subprocess.Popen[str]]
) -> None:
    child = start(started)
    assert not processes.signal((child.pid, start_of(child.pid) - 1), signal.SIGKILL)
    assert child.poll() is None
    assert not processes.signal((1 << 22, 1), signal.SIGKILL)


def test_a_process_that_gets_its_environment_by_exec_is_found(
    processes: Processes, started: list[subprocess.Popen[str]]
) -> None:
    script = (
        "import os, sys; input(); os.execve(sys.executable, [sys.executable, '-c', 'input()'],"
        f" {{**os.environ, 'GPUSHARE_LEASE': '{LEASE}'}})"
    )
    child = start(started, script, env=dict(os.environ))
    assert child.pid not in pids(processes)
    assert child.stdin
    child.stdin.write("\n")
    child.stdin.flush()
    until(lambda: child.pid in pids(processes), "it is found after its exec")


def test_a_jupyter_kernel_is_known_by_its_connection_file(
    processes: Processes, started: list[subprocess.Popen[str]]
) -> None:
    kernel = "01234567-89ab-cdef-0123-456789abcdef"
    child = subprocess.Popen(
        [sys.executable, "-c", "input()", f"/run/kernel-{kernel}.json"],
        env=CARRIES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    started.append(child)
    until(
        lambda: any(process.kernel == kernel for process in processes.scan(OWNERS)[LEASE]),
        "the kernel is found",
    )


def test_a_double_forked_child_belongs_and_is_signalled_with_all(machine: Machine) -> None:
    machine.lease("job")
    worker = machine.worker("job", mib=64)
    pid, code = (int(word) for word in worker.do("detach 64").split())
    assert code == 0
    until(lambda: pid in [process["pid"] for process in machine.of("job")["processes"]], "it is found")
    worker.kill()
    assert machine.of("job")["alive"]
    assert machine.ask("signal", lease="job", number=9, to="all")["count"] == 1
    until(lambda: not machine.of("job")["alive"], "all are gone")
    assert machine.sim.device_used(0) == 0


def test_a_signal_reaches_the_leader_only_or_all(machine: Machine) -> None:
    machine.lease("job")
    worker = machine.worker("job", mib=64)
    child = int(worker.do("spawn 64").split()[0])
    assert machine.ask("signal", lease="job", number=9)["count"] == 1
    assert worker.process.wait(PATIENCE_S) == -9
    until(lambda: [each["pid"] for each in machine.of("job")["processes"]] == [child], "the child is left")
    assert machine.ask("signal", lease="job", number=9, to="all")["count"] == 1
    until(lambda: machine.ask("signal", lease="job", number=9, to="all")["count"] == 0, "nobody is left")


def refuses(code: int) -> Callable[[int], int]:
    def pidfd_open(pid: int) -> int:
        raise OSError(code, os.strerror(code))

    return pidfd_open


def test_who_could_not_be_looked_at_is_not_taken_for_gone(
    processes: Processes, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(started)
    key = child.pid, start_of(child.pid)
    monkeypatch.setattr(os, "pidfd_open", refuses(errno.EMFILE))
    for question in (processes.alive, lambda key: processes.signal(key, signal.SIGKILL)):
        with pytest.raises(OSError, match="Too many open files"):
            question(key)
    monkeypatch.setattr(os, "pidfd_open", refuses(errno.ESRCH))
    assert not processes.alive(key)


def test_a_kernel_without_pidfds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", refuses(errno.ENOSYS))
    with pytest.raises(HelperError, match=r"Function not implemented.*Linux 5.3"):
        Processes(tmp_path)


CROWD = """
import os, signal
for _ in range(300):
    if not os.fork():
        signal.pause()
print("ready 0", flush=True)
signal.pause()
"""
FEW_DESCRIPTORS = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"


def test_who_starts_more_processes_than_can_be_held_costs_the_others_nothing(bare: Machine) -> None:
    """The helper may open fewer descriptors than eve has processes: nobody is taken for gone."""
    bare.start("--watchdog", "stop", before=FEW_DESCRIPTORS)
    bare.lease("eve", 20 * GIB)
    crowd = bare.worker("eve", command=[sys.executable, "-c", CROWD], wait=False)
    assert crowd.answer() == "ready 0"
    bare.settled("eve")
    bare.lease("ada", 20 * GIB)
    ada = bare.worker("ada", mib=64)
    assert bare.ask("suspend", lease="ada", calls=bare.settled("ada"))["done"]
    assert bare.sim.device_used(0) == 0
    assert bare.ask("resume", lease="ada")["done"]
    assert ada.do("check") == "ok"
    ada.kill()
    until(lambda: not bare.of("ada")["alive"], "its end")
    os.killpg(crowd.pid, signal.SIGKILL)
    until(lambda: not bare.of("eve")["alive"], "the end of all")
    assert "stranger" not in bare.log.read_text()


#: As in a helper that holds a thousand processes: what it opens from here on has a larger number.
MANY_OPEN = (
    "import os, resource; most = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)); [os.open('/dev/null', 0) for _ in range(1100)]"
)


def test_a_helper_with_more_than_a_thousand_open_files_works(bare: Machine) -> None:
    bare.start(before=MANY_OPEN, examine=True)
    assert bare.ask("inventory")["devices"][0]["suspendable"]
    bare.lease("ada")
    worker = bare.worker("ada", mib=64)
    moved = bare.ask("suspend", lease="ada", calls=bare.settled("ada"))
    assert moved["done"], moved
    assert bare.ask("resume", lease="ada")["done"]
    assert worker.do("check") == "ok"
    assert bare.ask("signal", lease="ada", number=9)["count"] == 1
    until(lambda: not bare.of("ada")["alive"], "its end")
