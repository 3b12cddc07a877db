"""Processes without a lease: who is told, and which of them are stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.checks import unleased
from jupyter_gpushare.gpu.checks.unleased import StopRules, UnleasedProcesses
from jupyter_gpushare.gpu.driver.nvml import DeviceReading
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.holders import Holders
from jupyter_gpushare.gpu.leases.processes import Processes
from tests.gpu.containers import engine_cgroup
from tests.gpu.leases import lease_of
from tests.gpu.machine import GIB, PATIENCE_S, Machine, until

USER = 41_001 if os.geteuid() == 0 else os.geteuid()
OTHER = USER + 1
UUID = "GPU-1"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start processes of others")


class Scene:
    """A real process of `USER` on a device that is leased to `OTHER`, sample after sample."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.silent = False  # nothing that is read answers
        monkeypatch.setattr(unleased, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.holders = Holders(folder / "holders", "boot")
        self.holders.add(USER)
        self.processes = Processes(folder)
        self.rules: dict[str, Any] = {"first_uid": 1}
        self.events = Events()
        self.told = self.events.watch()
        self.lease(OTHER)
        self.child: subprocess.Popen[bytes]
        self.pid = 0  # on the device

    def lease(self, *uids: int) -> None:
        """Lease the device to these users, and to no other."""
        self.leases = [lease_of(f"lease-{uid}", {UUID: GIB}, uid=uid) for uid in uids]

    def begin(self, *command: str, uid: int = USER) -> None:
        asked = {"user": uid} if os.geteuid() == 0 else {}
        environment = {"PATH": os.environ["PATH"]}
        self.child = subprocess.Popen(command or ("sleep", "600"), env=environment, **asked)
        self.pid = self.child.pid
        self.watch = UnleasedProcesses(
            StopRules(**self.rules), self.processes, self.events, self.holders, set()
        )

    def sample(self, at: float, used: int = GIB) -> None:
        self.now = at
        until(self._scanned, "the child answers")
        usage = DeviceReading(used, 0, 0, processes={self.pid: used}, computing=None)
        self.watch.compare({UUID: usage}, self.leases)

    def _scanned(self) -> bool:
        self.processes.scan({})
        found = self.processes.find(self.pid)
        return self.silent or found is None or not found.unread

    def minutes(self, count: int = 2) -> None:
        for at in range(0, 60 * count, 10):
            self.sample(float(at))

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def events_so_far(self) -> list[Any]:
        return [self.told.get_nowait() for _ in range(self.told.qsize())]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    scene = Scene(tmp_path, monkeypatch)
    yield scene
    scene.child.kill()
    scene.child.wait()


def ignores_sigterm(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.partition(":")[2] for line in lines if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_it_is_reported_at_once_and_stopped_after_the_notice(scene: Scene) -> None:
    scene.begin()
    scene.sample(0.0)
    (event,) = scene.events_so_far()
    assert event is not None
    assert (event.fields["uid"], event.fields["action"]) == (str(USER), "warn")
    assert "stopped in 30 s" in event.reason
    scene.sample(29.0)
    assert scene.alive
    scene.sample(30.0)
    assert scene.child.wait(PATIENCE_S) == -signal.SIGTERM
    (event,) = scene.events_so_far()
    assert event is not None
    assert event.fields["action"] == "stop"


def test_its_device_takes_nothing_new_until_it_may_be_ended(scene: Scene) -> None:
    """Where no other user has a lease, the device is granted after the notice, and then the process ends."""
    scene.lease()
    scene.begin()
    seen = []
    for at in (0.0, 1.0, 29.0, 30.0):
        scene.sample(at)
        seen.append(scene.watch.closes(UUID))
    assert seen == [False, True, True, False]
    scene.lease(OTHER)
    scene.sample(31.0)
    assert scene.watch.closes(UUID)
    scene.sample(32.0)
    assert scene.child.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("rules", "closes"),
    [({"stops": False}, True), ({"ignore": ("/",)}, False), ({"first_uid": USER + 1}, False)],
    ids=["only reported", "ignored", "a system user's"],
)
def test_what_is_only_reported_closes_its_device_and_what_the_site_runs_does_not(
    scene: Scene, rules: dict[str, Any], closes: bool
) -> None:
    scene.rules |= rules
    scene.begin()
    scene.minutes()
    assert scene.watch.closes(UUID) == closes
    scene.sample(120.0, used=0)
    assert not scene.watch.closes(UUID)


def test_a_relay_of_short_processes_gains_no_time(scene: Scene) -> None:
    """The notice is their user's: one that begins later closes no device, and is stopped where others are."""
    scene.begin()
    for at in (0.0, 1.0, 29.0):
        scene.sample(at)
    scene.child.kill()
    as_user: dict[str, Any] = {"user": USER} if os.geteuid() == 0 else {}
    with subprocess.Popen(["sleep", "600"], env={"PATH": os.environ["PATH"]}, **as_user) as second:
        scene.pid = second.pid
        scene.lease()
        for at in (30.0, 31.0):
            scene.sample(at)
        assert not scene.watch.closes(UUID)
        scene.lease(OTHER)
        for at in (32.0, 33.0):
            scene.sample(at)
        assert second.wait(PATIENCE_S) == -signal.SIGTERM


def test_one_that_ignores_sigterm_is_killed(scene: Scene) -> None:
    scene.begin("sh", "-c", "trap '' TERM; while :; do sleep 1; done")
    while not ignores_sigterm(scene.child.pid):
        assert scene.alive
    for at in (0.0, 30.0, 31.0):
        scene.sample(at)
    assert scene.alive
    scene.sample(35.0)
    assert scene.child.wait(PATIENCE_S) == -signal.SIGKILL


def test_it_is_reported_again_each_hour(scene: Scene) -> None:
    scene.rules["stops"] = False
    scene.begin()
    for at in (0.0, 1.0, 3_599.0, 3_600.0, 3_601.0, 7_200.0):
        scene.sample(at)
    assert len(scene.events_so_far()) == 3
    assert scene.alive


@pytest.mark.parametrize("spared", ["user", "device", "record", "system", "memory", "cgroup"])
def test_one_condition_that_does_not_hold_spares_it(scene: Scene, spared: str, tmp_path: Path) -> None:
    match spared:
        case "user":
            scene.holders = Holders(tmp_path / "none", "boot")
        case "device":
            scene.lease(USER)
        case "record":
            scene.holders.lose_record(USER)
        case "system":
            scene.rules["first_uid"] = USER + 1
        case "cgroup":
            path = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[-1]
            scene.rules["ignore"] = (path,)
    scene.begin()
    if spared == "memory":
        for at in range(0, 120, 10):
            scene.sample(float(at), used=(at // 10 % 2) * GIB)  # never in two samples in a row
    else:
        scene.minutes()
    assert scene.alive
    (event,) = scene.events_so_far()
    assert event is not None
    assert spared == "memory" or "left alone" in event.reason


def named_as(name: str, folder: Path) -> str:
    """A program of this name that sleeps, and then runs what it is given."""
    program = folder / name
    shutil.copy(shutil.which("sh") or "", program)
    program.chmod(0o755)
    for each in (folder, *folder.parents[:3]):
        if os.geteuid() == 0 and each != Path("/tmp"):
            each.chmod(0o755)
    return str(program)


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until(lambda: children.read_text().strip(), "it has a child")
    return int(children.read_text().split()[0])


def test_a_lost_record_spares_no_other_user(scene: Scene) -> None:
    scene.holders.lose_record(OTHER)
    scene.begin()
    scene.minutes()
    assert scene.child.wait(PATIENCE_S) == -signal.SIGTERM


def test_a_process_that_takes_the_name_of_an_mps_server_is_stopped(scene: Scene, tmp_path: Path) -> None:
    scene.begin(named_as("nvidia-cuda-mps-server", tmp_path), "-c", "while :; do sleep 1; done")
    until(lambda: Path(f"/proc/{scene.pid}/comm").read_text() == "nvidia-cuda-mps\n", "it has the name")
    scene.minutes()
    assert scene.child.wait(PATIENCE_S) == -signal.SIGTERM


@needs_root
def test_a_server_of_roots_mps_control_daemon_lives_on(scene: Scene, tmp_path: Path) -> None:
    control = named_as("nvidia-cuda-mps-control", tmp_path)
    scene.begin(control, "-c", f"setpriv --reuid {USER} --clear-groups sleep 600; :", uid=0)
    scene.pid = child_of(scene.child.pid)
    until(lambda: Path(f"/proc/{scene.pid}/comm").read_text() == "sleep\n", "it has its user")
    scene.minutes()
    assert scene.alive
    assert "it is an MPS server" in scene.events_so_far()[0].reason
    os.kill(scene.pid, signal.SIGKILL)


@needs_root
def test_a_process_in_a_container_without_a_lease_lives_on(scene: Scene) -> None:
    with engine_cgroup() as cgroup:
        scene.begin(
            "sh", "-c", f"echo $$ > {cgroup}/cgroup.procs; exec setpriv --reuid {USER} sleep 600", uid=0
        )
        until(lambda: Path(f"/proc/{scene.pid}/comm").read_text() == "sleep\n", "it has its user")
        scene.minutes()
        assert scene.alive
        assert "in a container without a lease" in scene.events_so_far()[0].reason
        scene.child.kill()


@needs_root
@pytest.mark.parametrize("uid", [0, OTHER], ids=["root", "other"])
def test_every_process_of_a_container_that_had_a_lease_is_stopped(
    scene: Scene, uid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene.processes, "had_lease", lambda process: True)
    scene.begin(uid=uid)
    scene.minutes()
    assert scene.child.wait(PATIENCE_S) == -signal.SIGTERM


@needs_root
def test_another_uid_in_a_users_own_namespace_is_still_that_user(scene: Scene) -> None:
    """As a rootless engine does, with the uids that newuidmap(1) gives a user."""
    made = ["unshare", "--user", "sh", "-c", "echo; read go; exec setpriv --reuid 5 sleep 600"]
    asked: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "user": USER}
    with subprocess.Popen(made, env={"PATH": os.environ["PATH"]}, **asked) as child:
        try:
            if not child.stdout.readline():
                pytest.skip("users may make no namespaces on this machine")
            Path(f"/proc/{child.pid}/uid_map").write_text(f"0 {USER} 1\n5 {USER + 500} 1\n")
            scene.begin()
            scene.child.kill()
            scene.child.wait()
            child.stdin.write(b"\n")
            child.stdin.flush()
            until(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "sleep\n", "it runs")
            assert os.stat(f"/proc/{child.pid}").st_uid in (0, USER + 500)
            scene.pid = child.pid
            scene.minutes()
            assert child.wait(PATIENCE_S) == -signal.SIGTERM
        finally:
            child.kill()


def test_a_users_own_pid_namespace_hides_nothing(scene: Scene) -> None:
    own = ("unshare", "--user", "--pid", "--fork", "--kill-child")
    as_user: dict[str, Any] = {"user": USER} if os.geteuid() == 0 else {}
    if subprocess.run([*own, "true"], check=False, **as_user).returncode:
        pytest.skip("users may make no namespaces on this machine")
    scene.begin(*own, "sleep", "600")
    scene.pid = child_of(scene.child.pid)
    until(lambda: Path(f"/proc/{scene.pid}/comm").read_text() == "sleep\n", "it runs")
    scene.minutes()
    assert scene.child.wait(PATIENCE_S) != 0


def test_a_process_in_a_lease_is_no_matter_of_this_check(scene: Scene) -> None:
    scene.begin()
    scene.processes.scan({})
    found = scene.processes.find(scene.child.pid)
    assert found is not None
    scene.leases[0].processes = (found,)
    scene.minutes()
    assert scene.alive
    assert scene.events_so_far() == []


def test_holders_are_kept_for_one_boot(tmp_path: Path) -> None:
    holders = Holders(tmp_path / "holders", "boot-1")
    holders.add(1001)
    holders.lose_record(1002)
    again = Holders(tmp_path / "holders", "boot-1")
    assert (again.uids, again.with_lost_record) == (frozenset({1001}), frozenset({1002}))
    other = Holders(tmp_path / "holders", "boot-2")
    assert (other.uids, other.with_lost_record) == (frozenset(), frozenset())
    (tmp_path / "holders").write_bytes(b"{")
    assert Holders(tmp_path / "holders", "boot-1").uids == frozenset()


def test_all_kernels_live_on_after_the_helper_lost_its_folders(bare: Machine) -> None:
    bare.start("--stop-uids", "1")
    for name in ("ada", "bo"):
        bare.lease(name, 8 * GIB)
    workers = [bare.worker(name, mib=64) for name in ("ada", "bo")]
    bare.stop()
    shutil.rmtree(bare.state_dir)
    bare.start("--stop-uids", "1")
    until(lambda: bare.log.read_text().count("left alone") >= 2, "both are reported")
    assert [worker.do("check") for worker in workers] == ["ok", "ok"]


@pytest.fixture
def silent(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A scene in which no process answers."""
    monkeypatch.setattr(scene.processes._memory, "read", lambda users, within_s: {})
    scene.silent = True
    return scene


def test_a_process_that_does_not_answer_is_stopped_where_its_user_has_no_lease(silent: Scene) -> None:
    silent.begin()
    silent.minutes()
    assert silent.child.wait(PATIENCE_S) == -signal.SIGTERM
    assert [event.fields["action"] for event in silent.events_so_far()] == ["warn", "stop"]


@pytest.mark.parametrize("over", [False, True], ids=["within its lease", "beyond its lease"])
def test_a_process_that_does_not_answer_may_hold_what_its_user_was_granted(silent: Scene, over: bool) -> None:
    silent.lease(OTHER, USER)
    silent.begin()
    silent.minutes()
    assert silent.alive
    assert "may be in lease" in silent.events_so_far()[0].reason
    if over:
        for at in (120.0, 121.0):
            silent.sample(at, used=2 * GIB)
        assert silent.child.wait(PATIENCE_S) == -signal.SIGTERM


def test_a_process_that_does_not_answer_ends_with_the_lease_that_it_may_be_in(silent: Scene) -> None:
    silent.lease(USER)  # the device is leased to no other user
    silent.begin()
    silent.minutes()
    assert silent.alive
    silent.leases[0].killed = True
    for at in (120.0, 121.0):
        silent.sample(at)
    assert silent.child.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.parametrize("spared", ["system", "record", "older", "report"])
def test_a_process_that_does_not_answer_is_left_alone_where_a_rule_spares_it(
    silent: Scene, spared: str
) -> None:
    match spared:
        case "system":
            silent.rules["first_uid"] = USER + 1
        case "record":
            silent.holders.lose_record(USER)
        case "older":
            silent.holders.since_ticks = 1 << 60
        case "report":
            silent.rules["stops"] = False
    silent.lease(OTHER, USER)
    silent.leases[1].killed = True
    silent.begin()
    silent.minutes()
    assert silent.alive
    assert "left alone" in silent.events_so_far()[0].reason


def asked(scene: Scene, leases: Any = ()) -> None:
    (process,) = scene.watch.shown(UUID)
    scene.watch.end(UUID, process.process, leases)


def test_an_administrator_ends_one_that_the_watchdog_only_reports(scene: Scene) -> None:
    scene.rules["stops"] = False
    scene.lease()  # to no other user
    scene.begin()
    scene.sample(0.0, used=0)
    (process,) = scene.watch.shown(UUID)
    assert (process.pid, process.uid, process.kept, process.ending) == (scene.child.pid, USER, "", False)
    asked(scene)
    assert scene.child.wait(PATIENCE_S) == -signal.SIGTERM
    *_, event = scene.events_so_far()
    assert event.fields["action"] == "stop"
    scene.sample(1.0)
    assert scene.watch.shown(UUID) == ()


def test_one_that_ignores_an_administrator_is_killed_after_a_grace(scene: Scene) -> None:
    scene.rules["stops"] = False
    scene.begin("sh", "-c", "trap '' TERM; while :; do sleep 1; done")
    while not ignores_sigterm(scene.child.pid):
        assert scene.alive
    scene.sample(0.0)
    asked(scene)
    scene.now = 3.0
    asked(scene)  # a repeated request gives it no more time
    assert scene.watch.shown(UUID)[0].ending
    scene.sample(4.9)
    assert scene.alive
    scene.sample(5.0)
    assert scene.child.wait(PATIENCE_S) == -signal.SIGKILL


@pytest.mark.parametrize("why", ["system", "record"])
def test_what_the_watchdog_never_stops_an_administrator_cannot_end(scene: Scene, why: str) -> None:
    match why:
        case "system":
            scene.rules["first_uid"] = USER + 1
        case "record":
            scene.holders.lose_record(USER)
    scene.begin()
    scene.sample(0.0)
    assert scene.watch.shown(UUID)[0].kept
    with pytest.raises(HelperError, match="is left alone"):
        asked(scene)
    scene.sample(60.0)
    assert scene.alive


def test_a_process_that_is_in_a_lease_by_now_is_not_ended(scene: Scene) -> None:
    scene.begin()
    scene.sample(0.0)
    (lease,) = scene.leases
    found = scene.processes.find(scene.child.pid)
    assert found is not None
    lease.processes = (found,)
    with pytest.raises(HelperError, match="no such process"):
        asked(scene, scene.leases)
    scene.sample(10.0)
    assert scene.watch.shown(UUID) == ()
    with pytest.raises(HelperError, match="no such process"):
        scene.watch.end(UUID, f"{found.pid}-{found.start_ticks}", [])
    assert scene.alive


def test_a_process_that_the_helper_may_not_signal_is_told_so(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.begin()
    scene.sample(0.0)

    def refused(*_: object) -> bool:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Processes, "signal", refused)
        with pytest.raises(HelperError, match="Operation not permitted"):
            asked(scene)
    assert not scene.watch.shown(UUID)[0].ending


def test_a_process_that_has_ended_is_not_said_to_be_told(scene: Scene) -> None:
    scene.begin()
    scene.sample(0.0)
    scene.child.kill()
    scene.child.wait(PATIENCE_S)
    with pytest.raises(HelperError, match="has ended"):
        asked(scene)
    assert scene.events_so_far()[-1].fields.get("action") != "stop"


def test_what_became_protected_after_the_request_is_not_killed(scene: Scene) -> None:
    scene.rules["stops"] = False
    scene.begin("sh", "-c", "trap '' TERM; while :; do sleep 1; done")
    while not ignores_sigterm(scene.child.pid):
        assert scene.alive
    scene.sample(0.0)
    asked(scene)
    scene.holders.lose_record(USER)
    scene.sample(5.0)
    assert scene.watch.shown(UUID)[0].kept
    assert scene.alive
