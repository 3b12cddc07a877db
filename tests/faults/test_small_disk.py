"""A file system that is full: a tmpfs that only the broker, or the process that stores, has mounted."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_gpushare.gpu.leases.journal import JournalRecord, StateDirectory
from jupyter_gpushare.protocol.helper import Phase, SetLimit
from tests.faults.site import Site, running
from tests.faults.story import Story, begun
from tests.waiting import until

# What it is given is run with a tmpfs of 24 MiB at $0, which goes with it.
_MOUNT = 'mount --make-rprivate / && mount -t tmpfs -o size=24m,mode=700 tmpfs "$0" && exec "$@"'
_STORE = """
import asyncio, os, sys
from dataclasses import replace
from pathlib import Path
from jupyter_gpushare.broker.state import store as module
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.errors import DiskFull
from tests.broker.stored import JOB

module.MIN_FREE_BYTES = 0  # SQLite itself meets the end of the disk
disk = Path(sys.argv[1])
url = f"sqlite:///{disk}/broker.sqlite"

def job(number):
    return replace(JOB, id=f"job{number}", idempotency_key=None, env={"A": os.urandom(30_000).hex()})

async def main():
    store, kept = Store(url, "boot"), []
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        ballast.write(bytes(18 << 20))
    while True:
        try:
            await store.commit([job(len(kept))])
        except DiskFull:
            break
        kept.append(len(kept))
    assert kept, "the disk was not empty enough"
    for _ in range(2):
        try:
            await store.commit([job("refused")])
            raise SystemExit("a commit on a full disk was answered")
        except DiskFull:
            pass
    assert len(store.load().jobs) == len(kept), "it reads"
    (disk / "ballast").unlink()
    await store.retry()
    await store.commit([job("after")])
    store.close()
    store = Store(url, "boot")
    assert {each.id for each in store.load().jobs} == {f"job{n}" for n in [*kept, "after"]}
    store.close()

asyncio.run(main())
"""
_JOURNAL = """
import os
import sys
from dataclasses import replace
from pathlib import Path
from jupyter_gpushare.gpu.leases.journal import JournalRecord, Parked, StateDirectory
from jupyter_gpushare.protocol.helper import Phase, SetLimit

disk = Path(sys.argv[1])
state = StateDirectory(disk, "boot")
def of(lease):
    asked = SetLimit(lease=lease, uid=1000, limits={"GPU-0": 1 << 30})
    return JournalRecord(asked=asked, phase=Phase.RUNNING)

ada = of("ada")
parked = [Parked(pid=pid, start_ticks=1, saved_bytes={"GPU-0": 1 << 30}) for pid in range(1, 100)]
wide = replace(of("wide"), parked=tuple(parked[:60]))
for record in (ada, wide):
    state.save(record)
state.raise_epoch(1_000_000)
with (disk / "ballast").open("wb", buffering=0) as ballast:
    try:
        while True:
            ballast.write(bytes(4096))
    except OSError:
        pass

def refused(change):
    try:
        change()
    except OSError:
        return True
    return False

asleep = replace(ada, phase=Phase.SUSPENDED, parked=tuple(parked[:5]))
awake = replace(ada, phase=Phase.RESUMING, unconfirmed=True)
for record in (asleep, awake, asleep):
    state.save(record)
state.raise_epoch(1_000_001)
assert refused(lambda: state.save(replace(ada, parked=tuple(parked)))), "more than its page"
assert refused(lambda: state.save(replace(wide, parked=()))), "its file has several pages"
assert refused(lambda: state.save(of("new")))
os.close(state._lock_fd)  # as the end of a helper does
state = StateDirectory(disk, "boot")
assert list(state.records().values()) == [asleep, wide], state.records()
assert state.epoch == 1_000_001
"""


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty folder, the mount point."""
    with tempfile.TemporaryDirectory(prefix="gpushare-disk-") as folder:
        tried = subprocess.run([*mounted(Path(folder)), "true"], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"a private mount namespace needs root (CAP_SYS_ADMIN): {tried.stderr[-300:]}")
        yield Path(folder)


def mounted(disk: Path) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", _MOUNT, str(disk)]


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


class SmallSite(Site):
    """A whole site; broker and helper have their state on one small disk, which outlives them."""

    def __init__(self, folder: Path, disk: Path) -> None:
        super().__init__(folder)
        self._keeper = subprocess.Popen([*mounted(disk), "sleep", "infinity"])
        until(lambda: self._is_mounted(disk), "the disk is mounted", process=self._keeper)
        self.disk = Path(f"/proc/{self._keeper.pid}/root{disk}")
        broker, helper = self.services["broker"], self.services["helper"]
        helper.command[helper.command.index("--state-dir") + 1] = f"{disk}/helper"
        helper.command += ["--lease-dir", f"{folder}/leases"]
        for service in (broker, helper):
            service.command = ["nsenter", f"--mount=/proc/{self._keeper.pid}/ns/mnt", *service.command]
        with (folder / "broker.py").open("a") as config:
            config.write(f'c.GPUShareBroker.db_url = "sqlite:///{disk}/broker.sqlite"\n')

    def _is_mounted(self, disk: Path) -> bool:
        mounts = Path(f"/proc/{self._keeper.pid}/mounts").read_text()
        return any(line.split()[1] == str(disk) for line in mounts.splitlines())

    def fill(self) -> None:
        with pytest.raises(OSError, match="No space left"):
            fill(self.disk / "ballast")

    def close(self) -> None:
        super().close()
        self._keeper.kill()
        self._keeper.wait()


@pytest.fixture
def small_site(disk: Path) -> Iterator[SmallSite]:
    with running(lambda folder: SmallSite(folder, disk)) as site:
        yield site


@pytest.fixture
def story(small_site: SmallSite) -> Story:
    return begun(small_site)


def test_a_session_wakes_when_the_job_on_its_gpu_ends_on_a_full_disk(
    small_site: SmallSite, story: Story
) -> None:
    site = small_site
    (lease,) = site.answer("GET", "leases", "ada")["leases"]
    site.fill()
    for method, path, user, body in (
        ("POST", "jobs", "bo", {"command": ["true"]}),
        ("POST", f"leases/{lease['id']}/keep", "ada", {"minutes": 5}),
        ("PUT", "projects/nlp", "root", {"weight": 2}),
        ("PUT", "lending", "root", {"mode": "off"}),
    ):
        assert site.answer(method, path, user, 507, json=body)["reason"] == "disk_full"
    for path in ("status", "jobs", "leases", "projects", "offers"):
        site.answer("GET", path, "bo")
    story.end_job()
    story.run_cell()
    assert "disk" in str(site.answer("GET", "health", status=503)["reasons"])
    for service in site.services.values():  # neither forgets what could not be stored
        service.kill()
    (site.disk / "ballast").unlink()
    for service in site.services.values():
        service.start()
    story.judge()


@pytest.mark.long
def test_a_session_wakes_while_neither_broker_nor_helper_can_write_a_byte(
    small_site: SmallSite, story: Story
) -> None:
    site = small_site
    site.services["broker"].kill()
    site.fill()
    story.end_job()
    site.services["helper"].kill()
    site.services["helper"].start()
    story.run_cell()
    (site.disk / "ballast").unlink()
    site.services["broker"].start()
    story.judge()


@pytest.mark.parametrize("code", [_STORE, _JOURNAL], ids=["SQLite", "the helper's journal"])
def test_what_stores_meets_the_end_of_the_disk(disk: Path, code: str) -> None:
    done = subprocess.run(
        [*mounted(disk), sys.executable, "-c", code, str(disk)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_no_record_is_written_over_into_blocks_that_its_file_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDirectory(tmp_path, "boot")
    asked = SetLimit(lease="ada", uid=1000, limits={"GPU-0": 1 << 30})
    ada = JournalRecord(asked=asked, phase=Phase.RUNNING)
    wide = replace(ada, counted=tuple((pid, 1, 1, 1) for pid in range(100, 300)))
    state.save(ada)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fstat = os.fstat
    monkeypatch.setattr(Path, "rename", full)
    # Blocks of 1 KiB.
    monkeypatch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_size=fstat(fd).st_size, st_blocks=2))
    with pytest.raises(OSError, match="No space"):
        state.save(wide)
    assert state.records() == {"ada": ada}
    state.save(replace(ada, phase=Phase.RESUMING))
    assert state.records() == {"ada": replace(ada, phase=Phase.RESUMING)}
