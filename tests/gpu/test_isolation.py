"""The two files of a lease: the C layout, and a user that writes anything into the account."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.gpu.leases import files as lease_files
from jupyter_gpushare.gpu.leases.files import (
    ACCOUNT_BYTES,
    LIMIT_BYTES,
    Counters,
    LeaseDirectory,
    PagePhase,
    Taint,
    check_lease,
    parse_account,
    uuid_bytes,
    words_of,
)
from tests.gpu.machine import GIB, Machine, until

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
OTHER = "GPU-ffeeddcc-bbaa-9988-7766-554433221100"
NATIVE = Path(lease_files.__file__).parents[2] / "native"

LAYOUT = """
#include <stddef.h>
#include <stdio.h>
#include "gpushare_lease.h"
#define P(name, value) printf("%s %llu\\n", name, (unsigned long long)(value))
int main(void) {
  P("DEVICES", GPUSHARE_DEVICES); P("SLOTS", GPUSHARE_SLOTS); P("VERSION", GPUSHARE_VERSION);
  P("LIMIT_MAGIC", GPUSHARE_LIMIT_MAGIC); P("ACCOUNT_MAGIC", GPUSHARE_ACCOUNT_MAGIC);
  P("LIMIT_BYTES", sizeof(struct gpushare_limit_page)); P("ACCOUNT_BYTES", sizeof(struct gpushare_account));
  P("COUNT_AT", offsetof(struct gpushare_limit_page, device_count));
  P("PHASE_AT", offsetof(struct gpushare_limit_page, phase));
  P("TURN_AT", offsetof(struct gpushare_limit_page, turn));
  P("AHEAD_AT", offsetof(struct gpushare_limit_page, ahead_us)); P("HELD", GPUSHARE_HELD);
  P("NO_TURNS", GPUSHARE_NO_TURNS);
  P("LIMIT_HEAD", offsetof(struct gpushare_limit_page, device));
  P("LIMIT_DEVICE", sizeof(struct gpushare_limit_device));
  P("LIMIT_IN_DEVICE", offsetof(struct gpushare_limit_device, limit_bytes));
  P("CONTEXT_IN_DEVICE", offsetof(struct gpushare_limit_device, context_bytes));
  P("ACCOUNT_HEAD", offsetof(struct gpushare_account, slot)); P("SLOT", sizeof(struct gpushare_slot));
  P("USED_IN_SLOT", offsetof(struct gpushare_slot, used_bytes));
  P("phase RUNNING", GPUSHARE_RUNNING); P("phase SUSPENDING", GPUSHARE_SUSPENDING);
  P("phase SUSPENDED", GPUSHARE_SUSPENDED); P("phase PAUSED", GPUSHARE_PAUSED);
  P("phase REVOKED", GPUSHARE_REVOKED);
  P("taint MANAGED", GPUSHARE_TAINT_MANAGED); P("taint IPC", GPUSHARE_TAINT_IPC);
  P("taint EXPORTED", GPUSHARE_TAINT_EXPORTED); P("taint PEER", GPUSHARE_TAINT_PEER);
  P("taint TRACED", GPUSHARE_TAINT_TRACED); P("taint FABRIC", GPUSHARE_TAINT_FABRIC);
  struct gpushare_account a = {.magic = GPUSHARE_ACCOUNT_MAGIC, .version = GPUSHARE_VERSION, .denied = 3};
  a.slot[7] = (struct gpushare_slot){.pid = 42, .taints = 2, .start_ticks = 99};
  a.slot[7].work = 2; a.slot[7].calls = 5; a.slot[7].queries = 6;
  a.slot[7].settled = 2; a.slot[7].waiting = 3; a.slot[7].looking = 1;
  a.slot[7].used_bytes[15] = 77;
  FILE *f = fopen("account", "wb");
  return f && fwrite(&a, sizeof a, 1, f) == 1 && !fclose(f) ? 0 : 1;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: apt-get install gcc")
def test_the_layout_is_that_of_the_c_header(tmp_path: Path) -> None:
    (tmp_path / "layout.c").write_text(LAYOUT)
    subprocess.run(["cc", f"-I{NATIVE}", "-o", "layout", "layout.c"], cwd=tmp_path, check=True, timeout=60)
    done = subprocess.run(["./layout"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60)
    for line in done.stdout.splitlines():
        name, value = line.rsplit(" ", 1)
        kind, _, member = name.rpartition(" ")
        if kind:
            here = {"phase": PagePhase, "taint": Taint}[kind][member]
        else:
            here = getattr(lease_files, name)
            here = here if isinstance(here, int) else here.size
        assert here == int(value), name
    account = parse_account((tmp_path / "account").read_bytes())
    assert account
    assert account.denied == 3
    ((key, slot),) = account.slots.items()
    assert (key, slot.taints) == ((42, 99), Taint.IPC)
    assert (slot.work, slot.calls, slot.queries) == (2, 7, 6)
    raw = (tmp_path / "account").read_bytes()
    turns = lease_files.SLOT.unpack_from(raw, lease_files.ACCOUNT_HEAD.size + 7 * lease_files.SLOT.size)[-3:]
    assert turns == (2, 3, 1)  # settled, waiting, looking
    assert slot.used_bytes == (0,) * 15 + (77,)


def directory(tmp_path: Path) -> LeaseDirectory:
    files = LeaseDirectory(tmp_path, "ada")
    files.create(os.geteuid(), {UUID: GIB}, PagePhase.RUNNING)
    return files


def test_the_page_is_the_helpers_and_the_account_the_users(tmp_path: Path) -> None:
    os.umask(os.umask(0o077))
    files = directory(tmp_path)
    assert files.path.stat().st_mode & 0o777 == 0o755
    assert (files.path / "limit").stat().st_mode & 0o777 == 0o644
    assert (files.path / "account").stat().st_mode & 0o777 == 0o600
    assert (files.path / "limit").stat().st_size == LIMIT_BYTES
    assert (files.path / "account").stat().st_size == ACCOUNT_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_the_account_belongs_to_the_leases_user(tmp_path: Path) -> None:
    files = LeaseDirectory(tmp_path, "ada")
    files.create(65533, {UUID: GIB}, PagePhase.RUNNING)
    assert (files.path / "account").stat().st_uid == 65533
    assert (files.path / "limit").stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_a_user_can_change_nothing_of_a_lease_but_the_account() -> None:
    root = Path(tempfile.mkdtemp(prefix="gpushare-"))
    root.chmod(0o711)
    try:
        files = LeaseDirectory(root, "ada")
        files.create(65533, {UUID: GIB}, PagePhase.RUNNING)
        page, account = files.path / "limit", files.path / "account"
        tries: list[Callable[[], object]] = [
            lambda: page.open("r+b"),
            lambda: account.rename(page),
            account.unlink,
            lambda: (files.path / "another").symlink_to(account),
            lambda: files.path.chmod(0o777),
            lambda: os.listdir(root),
        ]
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(65533)
                os.setuid(65533)
                os._exit(sum(1 << number for number, attempt in enumerate(tries) if not denied(attempt)))
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert files.phase() is PagePhase.RUNNING
        assert files.account() is not None
    finally:
        shutil.rmtree(root)


def denied(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    return False


def test_fields_of_the_page_change_one_by_one(tmp_path: Path) -> None:
    files = directory(tmp_path)
    files.set_phase(PagePhase.SUSPENDED)
    files.set_limit(0, 5)
    files.set_context(0, 7)
    files.set_kept(0, 9)
    files.set_devices([OTHER])
    raw = (files.path / "limit").read_bytes()
    assert lease_files.LIMIT_HEAD.unpack_from(raw)[2:] == (1, 0, 0, PagePhase.SUSPENDED, 0)
    assert lease_files.LIMIT_DEVICE.unpack_from(raw, lease_files.LIMIT_HEAD.size) == (
        uuid_bytes(OTHER),
        5,
        7,
        uuid_bytes(UUID),
        9,
    )
    assert files.phase() is PagePhase.SUSPENDED


def truncate(account: Path) -> None:
    os.truncate(account, 100)


def fifo(account: Path) -> None:
    account.unlink()
    os.mkfifo(account)


def link(account: Path) -> None:
    account.rename(account.with_name("elsewhere"))
    account.symlink_to("elsewhere")


def folder(account: Path) -> None:
    account.unlink()
    account.mkdir()


def garbage(account: Path) -> None:
    account.write_bytes(b"\xff" * ACCOUNT_BYTES)


def missing(account: Path) -> None:
    account.unlink()


HOSTILE = [truncate, fifo, link, folder, garbage, missing]


def test_an_account_that_grows_is_cut(tmp_path: Path) -> None:
    files = directory(tmp_path)
    account = files.path / "account"
    with account.open("ab") as file:
        file.write(b"x" * (8 << 20))
    assert files.account() is not None
    assert account.stat().st_size == ACCOUNT_BYTES


def test_nothing_is_cut_that_has_another_name_too(tmp_path: Path) -> None:
    files = directory(tmp_path)
    other = tmp_path / "notebook"
    other.write_bytes(b"x" * (ACCOUNT_BYTES + 1))
    (files.path / "account").unlink()
    (files.path / "account").hardlink_to(other)
    files.account()
    assert other.stat().st_size == ACCOUNT_BYTES + 1


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_a_hostile_account_costs_its_own_lease_only(machine: Machine, make: Callable[[Path], None]) -> None:
    directory = machine.lease("eve", 20 * GIB)
    machine.lease("ada", 20 * GIB)
    machine.worker("eve", mib=64)
    ada = machine.worker("ada", mib=64)
    make(directory / "account")
    until(lambda: not machine.of("eve")["suspendable"], "it is seen")
    assert "account file is broken" in machine.of("eve")["suspend_reason"]
    calls = machine.settled("ada")
    assert machine.ask("suspend", lease="ada", calls=calls)["done"]
    machine.resume("ada", ada)
    assert machine.ask("suspend", lease="eve", calls="c0")["refused"] == "not_suspendable"
    assert machine.ask("drop", lease="eve")["known"]
    assert not directory.exists()


def test_a_mutex_that_is_held_for_ever_does_not_hold_the_helper(machine: Machine) -> None:
    directory = machine.lease("eve")
    worker = machine.worker("eve", mib=64)
    with (directory / "account").open("r+b") as account:
        account.seek(16)
        account.write((1).to_bytes(4, "little") + bytes(4) + os.getpid().to_bytes(4, "little"))
    assert machine.ask("suspend", lease="eve")["done"]
    assert machine.ask("resume", lease="eve")["done"]
    worker.kill()
    until(lambda: not machine.of("eve")["alive"], "its end")
    assert machine.ask("drop", lease="eve")["known"]


def test_a_stopped_process_of_a_lease_does_not_hold_the_helper(machine: Machine) -> None:
    worker = machine.session("ada")
    os.kill(worker.pid, signal.SIGSTOP)
    assert machine.ask("suspend", lease="ada")["done"]
    os.kill(worker.pid, signal.SIGCONT)
    machine.resume("ada", worker)


def test_counters_that_change_under_the_reader_are_never_torn_into_an_error(tmp_path: Path) -> None:
    files = directory(tmp_path)
    stop = threading.Event()

    def scribble() -> None:
        with (files.path / "account").open("r+b", buffering=0) as account:
            count = 0
            while not stop.is_set():
                count += 1
                account.seek(0)
                account.write(
                    lease_files.ACCOUNT_HEAD.pack(lease_files.ACCOUNT_MAGIC, lease_files.VERSION, count)
                )
                account.write(lease_files.SLOT.pack(1, 0, 2, count, count, count, 0, 0, 0, 0, 0) * 256)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        until(lambda: files.account() and files.account().slots, "the first write")  # type: ignore[union-attr]
        for _ in range(200):
            assert files.account() is not None
    finally:
        stop.set()
        thread.join()
        files.close()


def test_only_calls_change_the_token() -> None:
    before = Counters({(1, 10): (5, 0)})
    assert Counters({(1, 10): (5, 9)}).token() == before.token()
    assert Counters({(1, 10): (5, 0), (2, 20): (0, 0)}).token() == before.token()
    assert Counters({(1, 10): (6, 0)}).token() != before.token()
    assert Counters({(1, 11): (5, 0)}).token() != before.token()


def test_calls_are_counted_per_process_and_the_dead_do_not_count() -> None:
    before = Counters({(1, 10): (5, 0), (2, 20): (7, 0)})
    assert not Counters({(1, 10): (5, 3)}).calls_since(before)
    assert Counters({(1, 10): (5, 3)}).queries_since(before)
    assert Counters({(1, 10): (5, 0), (3, 30): (1, 0)}).calls_since(before)
    assert Counters({(1, 11): (5, 0)}).calls_since(before)  # the pid was used again


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a" * 65, "a\n", "é"])
def test_a_lease_that_could_leave_its_directory_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_lease(name)


@pytest.mark.parametrize("uuid", ["", "GPU-", "0", "GPU-zz", "GPU-00", UUID + "00"])
def test_what_is_no_uuid_is_refused(uuid: str) -> None:
    with pytest.raises(InvalidRequest):
        uuid_bytes(uuid)


def test_a_mig_instance_has_a_uuid_too() -> None:
    assert uuid_bytes(UUID.replace("GPU", "MIG")) == uuid_bytes(UUID)


def test_taints_have_words() -> None:
    assert words_of([]) == ""
    assert words_of([Taint.IPC, Taint.MANAGED, Taint.IPC]) == "managed memory, CUDA IPC"
