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

from jupyter_gpushare import procfs
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.leases import processes as found_by
from jupyter_gpushare.gpu.leases.processes import Processes, leader
from jupyter_gpushare.procfs import start_ticks
from tests.gpu.machine import GIB, PATIENCE_S, Machine, until

# Found among all processes of this machine: no other run may have the same.
LEASE = f"ada{uuid.uuid4().hex}"
OWNERS = {LEASE: os.geteuid()}
CARRIES = {**os.environ, "GPUSHARE_LEASE": LEASE}


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []
    yield children
    for child in children:
        child.kill()
        child.communicate()


def start(
    started: list[subprocess.Popen[str]],
    script: str = "input()",
    *words: str,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", script, *words],
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


def test_the_innermost_cgroup_names_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = "0::/system.slice/gpushare-helper.service/gpushare-ada/kernels\n", procfs.read
    monkeypatch.setattr(
        procfs, "read", lambda pid, name, most: path.encode() if name == "cgroup" else read(pid, name, most)
    )
    found = found_by._first_seen(os.getpid(), 0.0)
    assert found is not None
    assert found.carries == "ada"


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


@pytest.mark.parametrize("asks", [True, False], ids=["PIDFD_GET_INFO", "a kernel without it"])
def test_how_a_process_ended_is_known_after_its_parent_waited_for_it(
    processes: Processes,
    started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    asks: bool,
) -> None:
    tells = asks and tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
    if not asks:
        monkeypatch.setattr(procfs, "_PIDFD_GET_INFO", 0)
    exits, killed, crashes = (start(started, "exit(input())") for _ in range(3))
    until(lambda: len(pids(processes)) == 3, "all are found")
    held = {process.pid: process.key for process in processes.scan(OWNERS)[LEASE]}
    keys = [held[child.pid] for child in (exits, killed, crashes)]
    assert [processes.exit_status(key) for key in keys] == [None, None, None]  # they live
    exits.stdin.write("3\n")  # type: ignore[union-attr]
    exits.stdin.flush()  # type: ignore[union-attr]
    killed.kill()
    crashes.send_signal(signal.SIGSEGV)
    for child in (exits, killed, crashes):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    if not tells:
        assert processes.wait_exit(PATIENCE_S)  # seen before the parent waits
    for child in (exits, killed, crashes):
        child.wait()
    assert processes.scan(OWNERS)[LEASE] == ()
    found = [processes.exit_status(key) for key in keys]
    assert [status is not None and os.waitstatus_to_exitcode(status) for status in found] == [
        1,  # exit("3") prints it
        -signal.SIGKILL,
        -signal.SIGSEGV,
    ]


def test_a_zombie_does_not_belong(processes: Processes, started: list[subprocess.Popen[str]]) -> None:
    child = start(started)
    until(lambda: child.pid in pids(processes), "the child is found")
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: processes.wait_exit(1.0), "the exit is noticed")
    for _ in range(3):
        assert child.pid not in pids(processes)
    assert not processes.alive((child.pid, start_ticks(child.pid)))


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
    assert not processes.signal((child.pid, start_ticks(child.pid) - 1), signal.SIGKILL)
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


#: As `setpriv --reuid`, or a program that gives its rights up: it becomes another user when told to.
GIVES_UP = (
    "import os; print(flush=True); input(); os.setresuid(65534, 65534, 65534); print(flush=True); input()"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("on_device", [False, True])
def test_a_process_that_becomes_the_leases_user_is_found(
    processes: Processes,
    started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    on_device: bool,
) -> None:
    """Within `SETTLES_S` of its start; later, where the driver shows it on a device."""
    if on_device:
        monkeypatch.setattr(found_by, "SETTLES_S", 0.0)
    owners = {LEASE: 65534}
    child = start(started, GIVES_UP)
    assert child.stdout
    assert child.stdin
    child.stdout.readline()
    until(lambda: LEASE in processes.scan(owners) and processes.find(child.pid), "it is seen as root")
    assert child.pid not in pids(processes, owners)
    child.stdin.write("\n")
    child.stdin.flush()
    child.stdout.readline()
    processes.on_devices = {child.pid} if on_device else ()
    until(lambda: child.pid in pids(processes, owners), "it is found as the lease's user")


def test_a_jupyter_kernel_is_known_by_its_connection_file(
    processes: Processes, started: list[subprocess.Popen[str]]
) -> None:
    kernel = "01234567-89ab-cdef-0123-456789abcdef"
    start(started, "input()", f"/run/kernel-{kernel}.json")
    until(
        lambda: any(process.kernel == kernel for process in processes.scan(OWNERS)[LEASE]),
        "the kernel is found",
    )


def test_a_double_forked_child_belongs_and_is_signalled_with_all(machine: Machine) -> None:
    worker = machine.session("job")
    pid, code = (int(word) for word in worker.do("detach 64").split())
    assert code == 0
    until(lambda: pid in [process["pid"] for process in machine.of("job")["processes"]], "it is found")
    worker.kill()
    assert machine.of("job")["alive"]
    assert machine.ask("signal", lease="job", number=9, to="all")["count"] == 1
    until(lambda: not machine.of("job")["alive"], "all are gone")
    until(lambda: machine.sim.device_used(0) == 0, "the driver frees their memory")


def test_a_signal_reaches_the_leader_only_or_all(machine: Machine) -> None:
    worker = machine.session("job")
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


def test_a_process_that_could_not_be_read_is_not_taken_for_gone(
    processes: Processes, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start(started)
    key = child.pid, start_ticks(child.pid)
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


def test_a_user_with_more_processes_than_can_be_held_costs_the_others_nothing(bare: Machine) -> None:
    """The helper may open fewer descriptors than eve has processes: no process is taken for gone."""
    bare.start("--watchdog", "stop", before=FEW_DESCRIPTORS)
    bare.lease("eve", 20 * GIB)
    crowd = bare.worker("eve", command=[sys.executable, "-c", CROWD], wait=False)
    assert crowd.answer() == "ready 0"
    bare.settled("eve")
    ada = bare.session("ada", 20 * GIB)
    assert bare.ask("suspend", lease="ada", calls=bare.settled("ada"))["done"]
    assert bare.sim.device_used(0) == 0
    bare.resume("ada", ada)
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
    worker = bare.session("ada")
    moved = bare.ask("suspend", lease="ada", calls=bare.settled("ada"))
    assert moved["done"], moved
    bare.resume("ada", worker)
    assert bare.ask("signal", lease="ada", number=9)["count"] == 1
    until(lambda: not bare.of("ada")["alive"], "its end")


def test_a_runner_that_is_slow_to_answer_again_is_still_the_runner(
    processes: Processes, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A young one is read in each scan, and a loaded machine may answer late."""
    start(started, "input()", f"GPUSHARE_LEASE={LEASE}")
    until(lambda: [p for p in processes.scan(OWNERS)[LEASE] if p.is_runner], "its arguments are read")
    monkeypatch.setattr(processes._memory, "read", lambda users, within_s: {})
    (again,) = processes.scan(OWNERS)[LEASE]
    assert (again.unread, again.is_runner, again.lease) == (True, True, LEASE)
    assert leader((again,)) is again


def test_a_child_of_a_runner_is_none_after_its_exec(machine: Machine) -> None:
    """A forked child has its parent's arguments until it calls exec, and may be seen just then."""
    machine.lease("j1-1")
    code = "import os; input(); os.execv('/bin/sleep', ['sleep', '600'])"
    command = [sys.executable, "-c", code, "GPUSHARE_LEASE=j1-1"]
    child = machine.worker("j1-1", command=command, preload=False, wait=False)
    until(lambda: machine.of("j1-1")["alive"], "it is found")
    assert not machine.of("j1-1")["runner_ended"]
    child.tell("")
    until(lambda: machine.of("j1-1")["runner_ended"], "it is no runner any more")
    assert machine.of("j1-1")["alive"]


def test_a_lease_says_when_the_runner_of_its_job_has_ended_and_others_live(machine: Machine) -> None:
    machine.lease("j1-1")
    code = (
        "import subprocess, sys; subprocess.Popen(['sleep', '600'], stdout=2);"
        "print('ready', flush=True); input()"
    )
    command = [sys.executable, "-c", code, "GPUSHARE_LEASE=j1-1"]
    runner = machine.worker("j1-1", command=command, preload=False, wait=False)
    assert runner.answer() == "ready"
    until(lambda: machine.of("j1-1")["alive"], "its processes are found")
    assert not machine.of("j1-1")["runner_ended"]
    runner.kill()
    until(lambda: machine.of("j1-1")["runner_ended"], "the end of the runner is seen")
    assert machine.of("j1-1")["alive"]
