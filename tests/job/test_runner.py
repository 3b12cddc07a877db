"""The runner as the Hub starts it: every way a command can behave, and what is told about it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from pathlib import Path

import pytest

from jupyter_gpushare.cli.job_logs import LocalLog
from jupyter_gpushare.protocol.heldlog import held_of
from tests.job.conftest import (
    OWNER_TOKEN,
    SERVER_TOKEN,
    STRANGER_TOKEN,
    HubAndBroker,
    Start,
    wait_for,
)
from tests.waiting import PATIENCE_S, is_alive

REPORTS = "/services/gpushare/api/v1/jobs/0123456789/attempts/1/report"


def python(code: str) -> tuple[str, str, str, str]:
    return (sys.executable, "-u", "-c", code)


# ---- ends --------------------------------------------------------------------


def test_a_command_that_ends_at_once_succeeds(start: Start, others: HubAndBroker) -> None:
    job = start("echo", "hello", program=True)
    report = job.ended()
    assert (report["exit_code"], report["stopped"]) == (0, False)
    assert job.log == "hello\n"
    assert job.exited() == 0
    assert job.record["state"] == "ended"
    assert job.record["reported"]
    assert set(others.paths) == {REPORTS}


def test_a_command_that_ended_before_the_hub_looked_is_still_there_to_be_seen(start: Start) -> None:
    job = start("true", probe=False)
    wait_for(lambda: job.others.reported("ended"), "the end is reported")
    job.probe()
    assert job.exited() == 0


def test_a_failed_job_quotes_its_last_lines_without_colours_and_bounded(start: Start) -> None:
    code = (
        "import sys; print('first'); print('a' * 999); print(' 1%|\\r 2%|#'); print('\\tindented'); print(); "
        "print('\\x1b[31mValueError\\x1b[0m:\\x07 ' + 'x' * 999 + '\\n\\n'); print('end', end=''); "
        "sys.exit(1)"
    )
    told, *quoted = start(*python(code)).ended()["reason"].split("\n")
    assert told == "Ended with exit code 1. It last printed:"
    assert quoted == ["a" * 197 + "...", " 2%|#", " indented", f"ValueError:  {'x' * 184}...", "end"]


@pytest.mark.parametrize(
    ("command", "given", "codes", "reason"),
    [
        (["sh", "-c", "echo fine"], {}, {0}, ""),
        (["sh", "-c", "echo oops >&2; exit 7"], {}, {7}, "Ended with exit code 7. It last printed:\noops"),
        (["sh", "-c", "kill -SEGV $$"], {}, {-signal.SIGSEGV}, "Ended by SIGSEGV."),
        # As in a shell.
        (["/no/such/command"], {}, {127}, "There is no command /no/such/command."),
        (["no-such-command"], {}, {127}, "There is no command no-such-command."),
        (["/etc/passwd"], {}, {126}, "/etc/passwd cannot be run: Permission denied."),
        (["true"], {"cwd": "/no/such/folder"}, {126}, "The folder /no/such/folder does not exist."),
        (["true"], {"cwd": "/etc/passwd"}, {126}, "The folder /etc/passwd does not exist."),
        ([], {}, {126, 127}, "The job has no command."),
        ([""], {}, {126, 127}, "The job has no command."),
        (["a\0b"], {}, {126, 127}, "a\0b cannot be run: embedded null byte."),
        (["echo", "a\0b"], {}, {126, 127}, "cannot be run: embedded null byte."),
    ],
    ids=repr,
)
def test_the_end_has_its_code_and_reason(
    start: Start, command: list[str], given: dict[str, str], codes: set[int], reason: str
) -> None:
    job = start(*command, **given)
    report = job.ended()
    assert report["exit_code"] in codes
    assert report["reason"].endswith(reason) if reason else not report["reason"]
    if codes <= {126, 127}:
        assert report["reason"] in job.log
        assert job.others.reported("started") is None


def test_a_file_of_the_user_shadows_nothing_of_the_runner_but_its_script_imports_its_neighbours(
    start: Start, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "queue.py").write_text("print('mine')")
    (home / "train.py").write_text("import queue")
    job = start(sys.executable, "train.py", program=True)
    assert job.ended()["exit_code"] == 0
    assert job.log == "mine\n"


def test_it_runs_in_its_directory_and_in_the_home_by_default(start: Start, tmp_path: Path) -> None:
    job = start("pwd")
    job.ended()
    assert job.log == f"{job.home}\n"
    job.others.reports.clear()
    job.exited()  # it writes its record once more after the report
    shutil.rmtree(job.folder)
    job = start("pwd", cwd=str(tmp_path))
    job.ended()
    assert job.log == f"{tmp_path}\n"


# ---- is stopped --------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_reaches_the_command_which_may_save_its_work(start: Start, number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(3)))\n"
        "print('ready')\n"
        "time.sleep(600)"
    )
    job = start(*python(code))
    job.printed("ready")
    job.process.send_signal(number)
    report = job.ended()
    assert (report["exit_code"], report["stopped"], report["reason"]) == (3, True, "Stopped.")
    assert "saved" in job.log


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace(start: Start) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
    )
    job = start(*python(code), grace_s=0.5)
    job.printed("ready")
    job.process.terminate()
    report = job.ended()
    assert (report["exit_code"], report["stopped"]) == (-signal.SIGKILL, True)
    assert "was killed" in report["reason"]


def test_a_command_that_cannot_notice_a_stop_and_exits_with_0_has_finished(start: Start) -> None:
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready')\n"
        "while not os.path.exists('go'): time.sleep(.05)"
    )
    job = start(*python(code))
    job.printed("ready")
    job.process.terminate()
    job.printed("asked to stop")
    (job.home / "go").touch()
    report = job.ended()
    assert (report["exit_code"], report["stopped"], report["reason"]) == (0, False, "")


CATCHES = "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"
BLOCKS = "import os, signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"


@pytest.mark.parametrize("code", [CATCHES, BLOCKS, "child"])
def test_a_command_that_may_have_noticed_a_stop_was_stopped_whatever_its_exit_code_is(
    start: Start, code: str
) -> None:
    waits = "\nprint('ready')\nwhile not os.path.exists('go'): time.sleep(.05)"
    shell = ["sh", "-c", """trap "" TERM; "$0" -uc "$1"; exit 0""", sys.executable, CATCHES + waits]
    job = start(*(shell if code == "child" else python(code + waits)))
    job.printed("ready")
    job.process.terminate()
    job.printed("asked to stop")
    (job.home / "go").touch()
    report = job.ended()
    assert (report["exit_code"], report["stopped"], report["reason"]) == (0, True, "Stopped.")


def test_a_second_signal_does_not_shorten_the_grace(start: Start) -> None:
    code = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    print('saving')\n"
        "    while not __import__('os').path.exists('go'): time.sleep(.05)\n"
        "    sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, save); print('ready'); time.sleep(600)"
    )
    job = start(*python(code))
    job.printed("ready")
    job.process.send_signal(signal.SIGINT)
    job.printed("saving")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        job.process.send_signal(number)
    (job.home / "go").touch()
    assert job.ended()["exit_code"] == 4


def test_children_that_fork_twice_are_ended_with_the_command(start: Start, tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        os.environ.clear()\n"
        "        open('escaped', 'w').write(str(os.getpid()))\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "while not os.path.exists('escaped'): time.sleep(.02)\n"
        "print('ready')\n"
        "time.sleep(600 if os.path.exists('stay') else 0)"
    )
    home = tmp_path / "home"
    home.mkdir()
    for stay in (True, False):
        (home / "escaped").unlink(missing_ok=True)
        shutil.rmtree(home / ".local", ignore_errors=True)
        (home / "stay").touch() if stay else (home / "stay").unlink()
        job = start(*python(code), grace_s=0.5)
        job.printed("ready")
        escaped = int(wait_for(lambda: (home / "escaped").read_text(), "the pid is written"))
        if stay:
            assert is_alive(escaped)
            job.process.terminate()
        assert job.ended()["stopped"] is stay
        assert not is_alive(escaped)
        job.exited()  # it writes its record once more after the report
        job.others.reports.clear()


def test_background_children_get_sigterm_first(start: Start) -> None:
    code = (
        "import os, signal, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(.5), print('child saved'), os._exit(0)))\n"
        "    open('there', 'w').close()\n"
        "    time.sleep(600)\n"
        "while not os.path.exists('there'): time.sleep(.02)"
    )
    job = start(*python(code))
    assert job.ended()["exit_code"] == 0
    assert "child saved" in job.log


@pytest.mark.oracle
def test_a_killed_runner_takes_its_command_along(start: Start) -> None:
    job = start("sh", "-c", "echo $$; exec sleep 600")
    job.printed("\n")
    pid = int(job.log)
    job.process.kill()
    wait_for(lambda: not is_alive(pid), "the command is gone")


# ---- what the command sees ---------------------------------------------------


def test_the_command_sees_its_lease_but_no_token(start: Start) -> None:
    own = {"CUDA_VISIBLE_DEVICES": "0", "GPUSHARE_LEASE": "x", "JUPYTERHUB_API_TOKEN": "x"}
    job = start("env", env={"EPOCHS": "3", "HOME": "/elsewhere", **own})
    job.ended()
    seen = dict(line.split("=", 1) for line in job.log.splitlines())
    assert SERVER_TOKEN not in job.log
    assert [key for key in seen if key.startswith(("JUPYTERHUB_", "JPY_"))] == ["JUPYTERHUB_USER"]
    assert not {"GPUSHARE_JOB", "GPUSHARE_API_URL"} & set(seen)
    assert seen["EPOCHS"] == "3"
    assert seen["HOME"] == "/elsewhere"
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["GPUSHARE_LEASE"]) == ("GPU-1", "j0123456789-1")
    assert (seen["GPUSHARE_JOB_ID"], seen["GPUSHARE_JOB_ATTEMPT"]) == ("0123456789", "1")


def test_an_attempt_with_an_ended_lease_starts_nothing(
    start: Start, tmp_path: Path, others: HubAndBroker
) -> None:
    lease = tmp_path / "ended"
    lease.mkdir()
    gone = start("touch", str(tmp_path / "ran"), runner_env={"GPUSHARE_LEASE_DIR": str(lease)})
    assert gone.exited() == 0  # after the Hub has seen it
    assert not (tmp_path / "ran").exists()
    # Neither a record, which the next attempt would take for an outcome, nor a report of an end.
    assert not gone.folder.exists() or not list(gone.folder.iterdir())
    assert not others.reports
    (lease / "limit").touch()
    start("touch", str(tmp_path / "ran"), runner_env={"GPUSHARE_LEASE_DIR": str(lease)}).ended()
    assert (tmp_path / "ran").exists()


def test_the_command_has_no_input(start: Start) -> None:
    assert start("cat").ended()["exit_code"] == 0


def test_a_command_gets_its_text_as_utf_8_in_any_locale(start: Start) -> None:
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    job = start("sh", "-c", 'echo héllo "$name"', program=True, runner_env=locale, env={"name": "wörld"})
    assert job.ended()["exit_code"] == 0
    assert job.log == "héllo wörld\n"


# ---- the log -----------------------------------------------------------------


def test_a_hundred_megabytes_are_printed_at_full_speed_and_kept_in_part(start: Start) -> None:
    code = "import sys\nfor n in range(100): sys.stdout.write(f'{n:02d}' + 'x' * (2**20 - 3) + '\\n')"
    job = start(*python(code))
    assert job.ended()["exit_code"] == 0
    kept = sorted(job.folder.glob("attempt-1.log*"))
    assert sum(path.stat().st_size for path in kept) <= 64 << 20
    assert kept[0].read_bytes().startswith(b"00x")
    assert kept[-1].read_bytes()[-(2**20) :].startswith(b"99x")
    assert job.record["log_bytes"] == 100 << 20


def test_a_disk_that_takes_nothing_ends_no_job(start: Start, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".local").write_text("not a folder")
    job = start("sh", "-c", "echo hello; exec sleep 600")
    wait_for(lambda: job.get("log", OWNER_TOKEN).text == "hello\n", "the log from memory")
    said = "6 bytes could not be written to the log: Not a directory"
    assert said in job.get("", OWNER_TOKEN).text


@pytest.mark.parametrize("code", [0, 3])
def test_the_end_says_what_was_printed_where_the_disk_took_nothing(
    start: Start, tmp_path: Path, code: int
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".local").write_text("not a folder")
    told = start("sh", "-c", f"echo hello; exit {code}").ended()["reason"].split("\n")
    ended = f"Ended with exit code {code}." if code else "It ran to its end."
    lacks = "6 bytes of its log were not written: Not a directory."
    assert told == [f"{ended} {lacks} It last printed:", "hello"]


FULL = """{
mount -t tmpfs -o size=3m tmpfs "$0"
head -c 4M /dev/zero > "$0/ballast" 2> /dev/null
test -s "$0/ballast"
}"""
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"'


@pytest.mark.parametrize(
    ("mount", "why"), [(FULL, "No space left on device"), (READ_ONLY, "Read-only file system")]
)
def test_a_log_is_shown_that_the_home_takes_nothing_of(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str], mount: str, why: str
) -> None:
    code = f"echo line; while [ ! -e {tmp_path}/go ]; do sleep .05; done; exit 3"
    # Its own name: other tests run jobs on this machine.
    job = start("sh", "-c", code, mount=mount, id=secrets.token_hex(5))
    held = wait_for(lambda: held_of(job.id), "the runner holds a line")
    assert (held.attempt, held.left_out_bytes, held.why) == (1, 5, why)
    # As `gpushare logs` while it runs, and the runner's own page.
    assert list(LocalLog(job.folder, None).read_on()) == [(1, b"line\n")]
    assert (
        f"5 bytes of this log were not written: {why}; the job keeps the last 64 KiB"
        in capsys.readouterr().err
    )
    assert f"5 bytes could not be written to the log: {why}" in job.get("", OWNER_TOKEN).text
    (tmp_path / "go").touch()
    lacks = f"Ended with exit code 3. 5 bytes of its log were not written: {why}. It last printed:\nline"
    assert job.ended()["reason"] == lacks
    assert job.exited() == 0
    assert held_of(job.id) is None


# Each call of it does not return, as on a network's disk whose server is away.
SILENT_DISK = """
import os, stat, tempfile, time
from jupyter_gpushare.protocol import jobfiles
tempfile.gettempdir()  # is on another disk
real = os.{call}
def silent(file, *given):
    if isinstance(file, str) or stat.S_ISREG(os.fstat(file).st_mode):
        time.sleep(9999)
    return real(file, *given)
os.{call} = silent
jobfiles.Disk.__init__.__defaults__ = (1.0,)
"""


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_silent_disk_delays_neither_pages_nor_the_stop(start: Start, call: str) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready'); time.sleep(600)"
    )
    job = start(*python(code), first=SILENT_DISK.format(call=call), grace_s=0.5)
    wait_for(lambda: "ready" in job.get("log", OWNER_TOKEN).text, "the log from memory")
    job.process.terminate()
    wait_for(lambda: "asked to stop" in job.get("", OWNER_TOKEN).text, "the page from memory")
    job.probe()
    report = job.ended()
    assert (report["exit_code"], report["stopped"]) == (-signal.SIGKILL, True)
    lacks = "bytes of its log were not written: the disk does not answer."
    assert report["reason"].endswith(lacks) == (call == "write")
    assert job.exited() == 0


SLOW_FSYNC = """
import os, time
from jupyter_gpushare.protocol import jobfiles
real = os.fsync
os.fsync = lambda file: (time.sleep(1.2), real(file))
jobfiles.Disk.__init__.__defaults__ = (0.5,)
"""


def test_a_job_on_a_slow_disk_succeeds_with_its_whole_log_and_its_record(start: Start) -> None:
    job = start("echo", "hello", first=SLOW_FSYNC, probe=False)
    report = job.ended()
    assert (report["exit_code"], report["reason"]) == (0, "")
    wait_for(lambda: job.state == "ended", "the record is on the disk in the end")
    assert (job.record["exit_code"], job.record["log_left_out_bytes"]) == (0, 0)


SLOW_RECORDS = """
import time
from jupyter_gpushare.job import runner
real = runner.unseen_outcome
runner.unseen_outcome = lambda *given: (time.sleep(4), real(*given))[1]
"""


def test_a_stop_before_the_earlier_records_are_read_touches_nothing(start: Start, tmp_path: Path) -> None:
    job = start("touch", str(tmp_path / "ran"), first=SLOW_RECORDS)
    job.probe()
    job.process.terminate()
    report = job.ended()
    assert (report["exit_code"], report["stopped"]) == (-signal.SIGTERM, True)
    assert job.exited() == 0
    assert not job.folder.exists() or not list(job.folder.iterdir())
    assert not (tmp_path / "ran").exists()


def test_a_command_whose_start_waits_for_a_silent_disk_is_stopped(start: Start, tmp_path: Path) -> None:
    job = start("touch", str(tmp_path / "ran"), first=SILENT_DISK.format(call="access"), grace_s=0.2)
    wait_for(lambda: job.folder.exists() and list(job.folder.glob("*.json")), "it is about to start")
    job.process.terminate()
    report = job.ended()
    assert (report["exit_code"], report["stopped"]) == (-signal.SIGTERM, True)
    assert report["reason"].startswith("Stopped before it was started")
    assert job.exited() == 0
    assert not (tmp_path / "ran").exists()


# ---- pages -------------------------------------------------------------------


def test_only_the_owner_reads_the_pages_and_others_are_led_to_the_login(start: Start) -> None:
    job = start("sh", "-c", "echo secret; exec sleep 600")
    job.printed("secret")
    for path in ("", "log", "status"):
        unknown, stranger = job.get(path), job.get(path, STRANGER_TOKEN)
        assert (unknown.status_code, stranger.status_code) == (302, 403)
        assert unknown.headers["Location"].startswith("/hub/api/oauth2/authorize")
        assert "secret" not in unknown.text + stranger.text


def test_a_runner_without_the_hubs_access_scopes_does_not_start(start: Start) -> None:
    job = start("true", probe=False, runner_env={"JUPYTERHUB_OAUTH_ACCESS_SCOPES": "[]"})
    assert job.process.wait(PATIENCE_S) != 0


def test_the_owner_reads_the_log_piece_by_piece(start: Start) -> None:
    job = start("sh", "-c", "printf 'a<b>c'; exec sleep 600")
    job.printed("a<b>c")
    page = job.get("", OWNER_TOKEN)
    assert "a&lt;b&gt;c" in page.text
    piece = job.get("log?offset=1", OWNER_TOKEN)
    assert piece.text == "<b>c"
    assert (piece.headers["X-Gpushare-Offset"], piece.headers["X-Gpushare-Next"]) == ("1", "5")
    assert piece.headers["Content-Type"].startswith("text/plain")
    assert job.get("log?offset=5", OWNER_TOKEN).text == ""
    for nonsense in ("-1", "x", "9" * 40):
        assert job.get(f"log?offset={nonsense}", OWNER_TOKEN).status_code == 400


def test_the_owner_sees_the_state(start: Start) -> None:
    job = start("sleep", "600")
    wait_for(lambda: job.get("status", OWNER_TOKEN).json()["state"] == "running", "the job runs")
    assert job.get("status", OWNER_TOKEN).json()["command"] == ["sleep", "600"]


def test_nothing_is_left_in_the_folder_of_temporary_files(start: Start, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    job = start("true", runner_env={"TMPDIR": str(tmp_path / "tmp")})
    job.ended()
    assert job.exited() == 0
    assert os.listdir(tmp_path / "tmp") == []


def test_without_a_job_it_says_so(tmp_path: Path) -> None:
    import subprocess

    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpushare.job"],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert "gpushare job:" in done.stderr
    assert "Traceback" not in done.stderr
