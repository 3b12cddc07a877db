"""A process in a container belongs to the lease of its container, whatever it does and whatever its pid."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.leases.containers import Containers
from jupyter_gpushare.gpu.leases.files import (
    ACCOUNT_BYTES,
    ACCOUNT_HEAD,
    ACCOUNT_MAGIC,
    SLOT,
    VERSION,
    LeaseDirectory,
    PagePhase,
)
from jupyter_gpushare.gpu.leases.processes import Process, keys_by_inner
from jupyter_gpushare.gpu.os.containers import container_of, mounts
from jupyter_gpushare.gpu.service import options
from tests.gpu.containers import engine_cgroup, escaped, in_container, pod_cgroup
from tests.gpu.leases import process_of
from tests.gpu.machine import GIB, MIB, PATIENCE_S, Machine, machine_in
from tests.gpu.test_seats import Node
from tests.waiting import until

UID = "0d1e2f3a-4b5c-6d7e-8f90-a1b2c3d4e5f6"
ID = "0123456789abcdef" * 4
OTHER = "ffffffff-4b5c-6d7e-8f90-a1b2c3d4e5f6"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@pytest.mark.parametrize(
    ("cgroup", "pod"),
    [
        (
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{_}.slice/cri-containerd-1.scope",
            UID,
        ),
        ("0::/kubepods/besteffort/pod{-}/abc", UID),
        ("0::/../../kubepods-pod{_}.slice/cri.scope", UID),
        ("0::/kubepods/pod{-}/abc/pod{other}/mine", UID),
        ("9:name=systemd:/\n4:memory:/kubepods/pod{-}/abc\n0::/", UID),
        ("0::/user.slice/user-1000.slice", ""),
        ("0::/kubepods/pod{-}x/abc", ""),
        ("", ""),
    ],
)
def test_the_outermost_container_of_a_cgroup_is_the_pod(cgroup: str, pod: str) -> None:
    written = cgroup.replace("{_}", UID.replace("-", "_")).replace("{-}", UID).replace("{other}", OTHER)
    assert container_of(written.encode()) == pod


def test_a_container_in_the_helpers_own_is_told_from_it() -> None:
    inner = "b" * 64
    assert container_of(f"0::/docker/{ID}/docker/{inner}".encode(), ID) == inner
    assert container_of(f"0::/docker/{ID}".encode(), ID) == ID


# ---- which pod has which lease ------------------------------------------------------------------


@pytest.fixture
def leases(tmp_path: Path) -> Path:
    folder = tmp_path / "the leases"
    for name in ("b1-1", "b2-1"):
        (folder / name).mkdir(parents=True)
    return folder


def container(script: str, *words: Path) -> subprocess.Popen[str]:
    """A process with mounts of its own, once they are made."""
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", f"{script}; echo ready; exec sleep 600", "sh", *map(str, words)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def key_of(process: subprocess.Popen[str]) -> tuple[int, int]:
    return process.pid, procfs.start_ticks(process.pid)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


@needs_root
def test_a_pod_has_the_lease_with_its_directory_mounted_there(
    tmp_path: Path, leases: Path, started: list[subprocess.Popen[str]]
) -> None:
    known = Containers(leases, tmp_path / "containers", "boot")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    held = container('mount --bind "$1" "$2"', leases / "b1-1", elsewhere)
    # The same path on a file system of its own, the parent folder, and nothing.
    forged = container(
        'mount -t tmpfs none "$1"; mkdir -p "$1$2"; mount --bind "$1$2" "$2"', elsewhere, leases / "b2-1"
    )
    above = container('mount --bind "$1" "$2"', leases, elsewhere)
    started += [held, forged, above]
    names = {"b1-1", "b2-1"}
    known.learn([(UID, key_of(above)), (UID, key_of(forged))], names)
    assert known.lease_of(UID) == ""
    known.learn([(UID, key_of(held)), (OTHER, key_of(forged))], {"b2-1"})  # no lease of this helper
    assert known.lease_of(UID) == ""
    known.learn([(UID, key_of(above)), (UID, key_of(held)), (OTHER, key_of(forged))], names)
    assert (known.lease_of(UID), known.lease_of(OTHER)) == ("b1-1", "")
    # The next helper knows it, also when the process has left its mounts; another boot does not.
    assert Containers(leases, tmp_path / "containers", "boot").lease_of(UID) == "b1-1"
    assert Containers(leases, tmp_path / "containers", "next boot").lease_of(UID) == ""
    (tmp_path / "containers").write_text("{")
    assert Containers(leases, tmp_path / "containers", "boot").lease_of(UID) == ""


@needs_root
def test_a_mount_that_a_user_made_gives_no_lease(started: list[subprocess.Popen[str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "b1-1").mkdir()
        own = [
            "setpriv",
            "--reuid",
            "41001",
            "--clear-groups",
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
        ]
        script = 'mount --bind "$1" /mnt; echo ready; exec sleep 600'
        command = [*own, "sh", "-ec", script, "sh", str(folder / "b1-1")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            pytest.skip("users may make no namespaces on this machine")
        known = Containers(folder)
        assert [point for _, root, point in mounts(process.pid) if root.endswith(b"/b1-1")] == [b"/mnt"]
        known.learn([(ID, key_of(process))], {"b1-1"})
        assert known.lease_of(ID) == ""


def test_a_pid_that_was_used_again_gives_no_lease(
    tmp_path: Path, leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Containers(leases)
    monkeypatch.setattr(known, "_lease_in", lambda found, leases: "b1-1")
    mine = (os.getpid(), procfs.start_ticks(os.getpid()))
    known.learn([(ID, (mine[0], mine[1] - 1))], {"b1-1"})
    assert known.lease_of(ID) == ""
    known.learn([(ID, mine)], {"b1-1"})
    assert known.lease_of(ID) == "b1-1"


@needs_root
def test_only_the_beginning_of_a_very_long_list_of_mounts_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[str]]
) -> None:
    held = container('mount --bind "$1" "$1"', tmp_path)
    started.append(held)
    whole = mounts(held.pid)
    assert str(tmp_path).encode() in [point for _, _, point in whole]
    monkeypatch.setattr("jupyter_gpushare.gpu.os.containers.MOUNTINFO_BYTES", 100)
    assert len(mounts(held.pid)) < len(whole)  # and no part of a line


def test_moving_processes_between_cgroups_is_refused_on_kubernetes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--state-dir", "x", "--seat-socket", "s", "--cgroup-root", "/sys/fs/cgroup/x"])
    assert "cgroups of their pods" in capsys.readouterr().err
    assert not options.parse(["--state-dir", "x", "--seat-socket", "s"]).unleased.stops
    assert options.parse(["--state-dir", "x"]).unleased.stops


# ---- pids of containers -------------------------------------------------------------------------


def process(pid: int, inner_pid: int, start: int) -> Process:
    return process_of(pid, start, inner_pid=inner_pid)


def write_account(files: LeaseDirectory, folder: Path, pids: tuple[int, ...]) -> None:
    """Create the lease a-1 with the entries of these processes: five calls each."""
    files.create(os.geteuid(), {}, PagePhase.RUNNING)
    raw = bytearray(ACCOUNT_BYTES)
    struct.pack_into("<II", raw, 0, ACCOUNT_MAGIC, VERSION)
    for number, pid in enumerate(pids):
        SLOT.pack_into(raw, ACCOUNT_HEAD.size + number * SLOT.size, pid, 0, 100, 0, 5, 0, 0, 0, 0, 0, 0)
    (folder / "a-1" / "account").write_bytes(raw)


def test_an_account_names_processes_by_the_pids_of_the_machine(tmp_path: Path) -> None:
    files = LeaseDirectory(tmp_path, "a-1")
    write_account(files, tmp_path, (7, 8))

    def named() -> list[int]:
        account = files.account()
        assert account is not None
        return [pid for pid, _ in account.slots]

    assert named() == [7, 8]
    files.know(keys_by_inner([process(4007, 7, 100), process(8, 8, 100)]))
    assert named() == [4007, 8]
    files.know({})  # it has ended; its slot stays
    assert named() == [4007, 8]


def test_a_process_that_ended_counts_as_before_for_a_helper_that_never_saw_it(tmp_path: Path) -> None:
    files = LeaseDirectory(tmp_path, "a-1")
    write_account(files, tmp_path, (7,))
    files.know(keys_by_inner([process(4007, 7, 100)]))
    before, after = files.account(), LeaseDirectory(tmp_path, "a-1").account()
    assert before is not None
    assert after is not None
    assert not after.counters().calls_since(before.counters())
    assert after.counters().token() == before.counters().token()


def test_two_processes_with_one_pid_in_their_namespaces_are_told_apart_by_none() -> None:
    both = [process(4007, 7, 100), process(5007, 7, 100), process(6007, 7, 101)]
    assert keys_by_inner(both) == {(7, 101): (6007, 101)}


@needs_root
def test_a_lease_in_a_pid_namespace_of_its_own_sleeps_and_wakes(machine: Machine) -> None:
    machine.lease("a-1")
    worker = in_container(machine, "a-1")
    assert worker.do("alloc 64") == "0"
    until(lambda: machine.of("a-1")["suspendable"] and machine.of("a-1")["processes"], "it can be suspended")
    (shown,) = machine.of("a-1")["processes"]
    assert shown["calls"] > 0
    watch = machine.watch()
    assert machine.ask("suspend", lease="a-1", calls=machine.settled("a-1"))["done"]
    assert machine.sim.device_used(0) == 0
    worker.tell("check")
    assert watch.event("wanted", "a-1") is not None
    assert machine.ask("resume", lease="a-1")["done"]
    assert worker.answer() == "check ok"


# ---- a node -------------------------------------------------------------------------------------


@needs_root
def test_whatever_a_process_of_a_pod_does_it_belongs_to_the_lease_of_its_pod(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    node = Node(tmp_path)
    node.seats = {}
    lease_dir = tmp_path_factory.mktemp("leases")
    begin = ("--seat-socket", str(tmp_path / "seat.sock"), "--node", "n1", "--lease-dir", str(lease_dir))
    with pod_cgroup() as pod, pod_cgroup() as other:
        try:
            node.start(*begin)
            seat = node.seat()
            folder = node.lease("b1-1")
            server = in_container(node, "b1-1", cgroup=pod, mounts=(folder,))
            hidden = escaped(node, pod)
            stranger = in_container(node, "b1-1", cgroup=other)  # it names the lease, and has no mount of it
            for worker in (server, hidden, stranger):
                assert worker.do("alloc 64") == "0"
            until(lambda: len(node.of("b1-1")["processes"]) == 2, "both are of the lease")
            seat.terminate()
            assert seat.wait(PATIENCE_S) == 0
            assert node.of("b1-1")["phase"] == "suspended"
            # Of no lease: the driver does not suspend it.  Its calls wait with those of the lease it names.
            assert node.sim.device_used(0) >= 64 * MIB
            os.killpg(stranger.pid, signal.SIGKILL)
            until(lambda: node.sim.device_used(0) == 0, "nothing of the lease is on the device")
            # The next helper knows the pod; its first process is gone.
            node.seat("seat-2")
            assert node.ask("resume", lease="b1-1")["done"]
            assert server.do("check") == "ok"
            os.killpg(server.pid, signal.SIGKILL)
            node.stop()
            node.start(*begin)
            until(lambda: len(node.of("b1-1")["processes"]) == 1, "the other is still of the lease")
            assert hidden.do("check") == "ok"
        finally:
            node.close()


@needs_root
def test_a_container_has_its_lease_without_the_pids_of_the_machine_and_is_watched(bare: Machine) -> None:
    """As Docker makes them: own pids, one uid for all users, and the folder of the lease mounted."""
    with engine_cgroup() as first, engine_cgroup() as second:
        bare.start(before="from jupyter_gpushare.gpu.checks import unleased; unleased.NOTICE_S = 0.5")
        one, other = bare.lease("b1-1", 30 * GIB), bare.lease("b2-1", 30 * GIB)
        ada = in_container(bare, "b1-1", cgroup=first, mounts=(one,))
        # It drops its environment, its root and its namespaces; and it names the lease of another.
        hidden = escaped(bare, first)
        liar = in_container(bare, "b1-1", cgroup=second, mounts=(other,))
        for worker in (ada, hidden, liar):
            assert worker.do("alloc 64") == "0"
        until(lambda: len(bare.of("b1-1")["processes"]) == 2, "both are of the lease")
        until(lambda: len(bare.of("b2-1")["processes"]) == 1, "it is of the lease of its container")
        outside = bare.worker("b1-1", wait=False)  # of the same uid, in no container
        assert outside.answer() == "ready 0"
        assert outside.do("alloc 64") == "0"
        bare.settled("b1-1")
        assert outside.pid not in [each["pid"] for each in bare.of("b1-1")["processes"]]
        outside.kill()
        bare.ask("suspend", lease="b1-1", calls=bare.settled("b1-1"))
        assert liar.do("check") == "ok"
        bare.ask("resume", lease="b1-1")
        assert ada.do("check") == "ok"
        # Its lease ends and it does not: it is told to end, also by the next helper.
        bare.ask("drop", lease="b2-1", end_processes=False)
        bare.stop(signal.SIGKILL)
        bare.start(before="from jupyter_gpushare.gpu.checks import unleased; unleased.NOTICE_S = 0.5")
        assert liar.process.wait(PATIENCE_S) != 0
        assert "action=stop" in bare.log.read_text()
        assert [ada.do("check"), hidden.do("check")] == ["ok", "ok"]


@pytest.fixture
def of_driver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two devices of the driver that the test names; no helper yet."""
    yield from machine_in(tmp_path, spec=f"2xH100-80GB,host=512GiB,driver={request.param}")


@needs_root
@pytest.mark.parametrize(
    ("of_driver", "sleeps"), [("575.51.02", False), ("575.57.08", True)], indirect=["of_driver"]
)
def test_a_container_with_some_gpus_is_left_awake_by_drivers_that_fail_there(
    of_driver: Machine, sleeps: bool
) -> None:
    """NVIDIA/cuda-checkpoint issues 12, 18 and 24: the self-test passes, it runs in no container."""
    machine = of_driver
    machine.start(examine=True)
    assert all(device["suspendable"] for device in machine.ask("inventory")["devices"])
    with engine_cgroup() as one, engine_cgroup() as two:
        some, every = machine.lease("b1-1"), machine.lease("b2-1", 20 * GIB, devices=(0, 1))
        contained = [
            in_container(machine, "b1-1", cgroup=one, mounts=(some,)),
            in_container(machine, "b2-1", cgroup=two, mounts=(every,)),
        ]
        machine.lease("c-1", 10 * GIB)
        outside = machine.worker("c-1", mib=64)
        for worker, name in zip(contained, ("b1-1", "b2-1"), strict=True):
            assert worker.do("alloc 64") == "0"
            until(lambda name=name: machine.of(name)["used_bytes"], "it is seen")
        until(lambda: machine.of("b1-1")["suspendable"] is sleeps, "the sample says so")
        for lease in ("b2-1", "c-1", *(["b1-1"] if sleeps else [])):
            moved = machine.ask("suspend", lease=lease)
            assert moved["done"], moved
            assert machine.ask("resume", lease=lease)["done"]
        if not sleeps:
            reason = (
                "driver 575.51.02-simulated cannot suspend in a container with some of the machine's GPUs"
            )
            assert machine.of("b1-1")["suspend_reason"] == reason
            moved = machine.ask("suspend", lease="b1-1")  # forced too
            assert (moved["refused"], moved["reason"]) == ("not_suspendable", reason)
        assert [worker.do("check") for worker in (*contained, outside)] == ["ok", "ok", "ok"]


def test_containers_of_ended_leases_are_forgotten_first(
    tmp_path: Path, leases: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Containers(leases, tmp_path / "containers", "boot")
    mounted = {1: "b1-1", 2: "b2-1", 3: "b2-1"}
    monkeypatch.setattr(known, "_mounted_in", lambda key, leases: mounted[key[0]])
    monkeypatch.setattr("jupyter_gpushare.gpu.leases.containers.MAX_CONTAINERS", 2)
    known.learn([("c1", (1, 1)), ("c2", (2, 1))], {"b1-1", "b2-1"})
    known.learn([("c3", (3, 1))], {"b1-1", "b2-1"})  # both have leases
    assert [known.lease_of(name) for name in ("c1", "c2", "c3")] == ["b1-1", "b2-1", ""]
    known.learn([("c3", (3, 1))], {"b2-1"})
    assert [known.lease_of(name) for name in ("c1", "c2", "c3")] == ["", "b2-1", "b2-1"]


@needs_root
def test_a_process_stays_in_its_container_after_its_first_thread() -> None:
    """With cgroup v1 such a process shows no cgroup of its own."""
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with engine_cgroup() as cgroup:
        enter = f'echo $$ > {cgroup}/cgroup.procs; exec "$@"'
        with subprocess.Popen(
            ["sh", "-c", enter, "sh", sys.executable, "-c", code], stdout=subprocess.PIPE
        ) as process:
            try:
                until(lambda: procfs.stat_fields(process.pid)[procfs.STATE] == b"Z", "its first thread ends")
                raw = procfs.cgroup(process.pid, procfs.stat_fields(process.pid), 8192)
                assert container_of(raw) == cgroup.name.removeprefix("docker-").removesuffix(".scope")
            finally:
                process.kill()
