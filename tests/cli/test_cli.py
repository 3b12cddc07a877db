from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import msgspec
import pytest

from jupyter_gpushare import cli, messages
from jupyter_gpushare.channel import api_url
from jupyter_gpushare.cli import job_logs, verbs
from jupyter_gpushare.errors import Conflict
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.heldlog import Held
from jupyter_gpushare.protocol.jobfiles import Piece

LOG_PLACE = ".local/share/gpushare/jobs"


# ---- usage -------------------------------------------------------------------


def test_help_of_every_verb_has_an_example(gpushare):
    verbs = re.findall(r"^    (\w+)  ", gpushare("--help").out, re.MULTILINE)
    verbs.remove("seat")  # which only the broker starts
    assert {"status", "edit", "resize", "admin", "simulate", "kube"} <= set(verbs)
    within = {"admin", "simulate", "kube"}
    of_groups = [
        [verb, name]
        for verb in sorted(within)
        for name in re.findall(r"^    (\w+)(?:  |$)", gpushare(verb, "--help").out, re.MULTILINE)
    ]
    assert ["admin", "drain"] in of_groups
    for words in [[], *([verb] for verb in verbs), *of_groups]:
        ran = gpushare(*words, "--help")
        assert ran.code == 0, words
        examples = ran.out[ran.out.lower().rindex("\nexamples") :]
        assert f"{' '.join(['gpushare', *words])} " in examples.replace("\n", " \n"), words


def test_submit_without_a_command_is_a_usage_error_that_shows_how(gpushare, broker):
    for words in (["submit"], ["submit", "--gpus", "1"], ["submit", "--"], ["submit", "--", ""]):
        ran = gpushare(*words)
        assert ran.code == 2
        assert "-- python train.py" in ran.err
    assert not broker.seen


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["submit", "--checkpoint", "pray", "--", "x"],
            "choose from suspend, 'suspend,sigterm', sigterm, none",
        ),
        (["submit", "--checkpoint", "sigtrem", "--", "x"], "did you mean sigterm?"),
        (["submit", "--env", "SEED", "--", "x"], "NAME=VALUE"),
        (["submit", "--gpus", "1", "--memory", "20GiB", "--", "x"], "not allowed with"),
        (["submit", "--max-run", "4h", "--retries", "11", "--", "x"], "0 to 10"),
        (["submit", "python", "--", "x"], "'python' stands before --"),
        (["submit", "--cwd", "no/such/place", "--", "x"], "no directory"),
        (["logs", "../../etc/passwd"], "not the id of a job"),
        (["cancel", "a/b"], "not the id of a job"),
        (["jobs", "--limit", "0"], "1 to 1000"),
        (["status", "--url", "ftp://x"], "not the address of a broker"),
        (["frobnicate"], "'frobnicate' is not known: choose from status, "),
        (["stauts"], "did you mean status?"),
        (["submit", "-p", "steps=5", "--", "x"], "-p is for notebooks"),
        (["submit", "run.ipynb"], "from a terminal or notebook of the Hub's servers only"),
        (["keep", "--minutes", "-1"], "0 to 1440"),
        (["show", "../x"], "not the id of a job"),
        ([], "VERB"),
    ],
)
def test_nonsense_is_a_usage_error_that_names_it(gpushare, broker, words, says):
    ran = gpushare(*words)
    assert ran.code == 2
    assert says in ran.err
    assert not broker.seen


def test_without_an_address_or_a_token_it_says_which_variable_is_missing(gpushare, monkeypatch):
    assert "GPUSHARE_API_URL" in gpushare("status").err
    monkeypatch.setenv("GPUSHARE_API_URL", "http://127.0.0.1:9")
    ran = gpushare("status")
    assert ran.code == 2
    assert "GPUSHARE_API_TOKEN" in ran.err


@pytest.mark.parametrize(
    "given",
    ["http://h", "http://h/", "http://h/services/gpushare", "http://h/services/gpushare/api/v1/"],
)
def test_address_of_hub_service_or_api_all_lead_to_the_api(given):
    assert api_url(given) == "http://h/services/gpushare/api/v1"


def test_status_starts_without_the_libraries_of_the_services():
    code = (
        "import sys; from jupyter_gpushare import cli\n"
        "try: cli.main(['status'])\n"
        "except SystemExit: pass\n"
        "heavy = {'tornado', 'sqlalchemy', 'alembic', 'jupyter_server', 'jupyterhub'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", ["simulate", "broker", "helper"])
def test_service_verbs_hand_their_words_to_the_service(gpushare, monkeypatch, verb):
    got = []

    class Module:
        @staticmethod
        def main(words):
            got.append(words)
            return 7

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Module)
    assert gpushare(verb, "--help", "--", "x").code == 7
    assert got == [["--help", "--", "x"]]


# ---- reading -----------------------------------------------------------------


def test_status_shows_lease_project_and_jobs_in_the_brokers_words(gpushare, broker):
    ran = gpushare("status")
    assert ran.code == 0
    assert "1/2 GPU  6.8 GiB of 40 GiB  Active  project vision, held by preload" in ran.out
    assert "Your 1/2 GPU is in use.\n  Share of the GPU's time: 50 % granted, 46 % measured" in ran.out
    assert "sweep" in ran.out
    assert "first try" not in ran.out  # it has ended


def test_status_json_is_the_brokers_answer(gpushare, broker, golden):
    assert gpushare("status", "--json").json == golden("status_active")


def test_status_without_anything_says_so(gpushare, broker, golden):
    broker.say_status(golden("status_empty"))
    ran = gpushare("status")
    assert "No GPU is held." in ran.out
    assert "device helper does not answer" in ran.out


def test_jobs_are_a_table_with_aligned_columns(gpushare, broker, golden):
    broker.answer("GET jobs", golden("job_list"))
    lines = gpushare("jobs").out.splitlines()
    assert [line.index("  ") for line in lines] == [2, 10, 10, 10]
    column = lines[0].index("STATE")
    assert [line[column:].split()[0] for line in lines[1:]] == ["running", "queued", "failed"]
    assert gpushare("jobs", "--json").json == golden("job_list")


def test_sharing_is_said_with_yes_or_no(gpushare, broker, golden):
    broker.answer("POST jobs", golden("job"), 201)
    for words, expected in ([], False), (["--share", "no"], False), (["--share=yes"], True):
        assert gpushare("submit", *words, "--", "true").code == 0
        assert broker.asked("POST jobs")[-1].json["share"] is expected
    ran = gpushare("submit", "--share", "maybe", "--", "true")
    assert ran.code == 2
    assert "'maybe' is neither yes nor no" in ran.err
    assert "gpushare submit --share yes -- python train.py" in gpushare("submit", "--help").out


@pytest.mark.parametrize("given", ["4", "h", "4weeks", "-1h"])
def test_a_maximum_run_time_has_its_unit(gpushare, given):
    ran = gpushare("submit", f"--max-run={given}", "--", "true")
    assert ran.code == 2
    assert "is not a time with its unit, like 30m, 4h or 2d" in ran.err


def test_status_jobs_and_submit_say_why_a_job_waits(gpushare, broker, golden):
    broker.answer("GET jobs", golden("job_list"))
    (queued,) = (job for job in golden("job_list")["jobs"] if job["state"] == "queued")
    broker.answer("POST jobs", queued, 201)
    for words in (["status"], ["jobs"], ["submit", "--", "python", "train.py"]):
        assert "Number 3. Needs 2 GPUs together; 1.25 are free." in gpushare(*words).out


def test_names_of_other_people_cannot_move_the_cursor(gpushare, broker, golden):
    jobs = golden("job_list")
    jobs["jobs"][0]["name"] = "\x1b[2Jevil\nline"
    broker.answer("GET jobs", jobs)
    out = gpushare("jobs").out
    assert "\x1b" not in out
    assert "?[2Jevil?line" in out


# ---- writing -----------------------------------------------------------------


def test_submit_sends_what_was_asked_from_the_current_directory(
    gpushare, broker, golden, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    broker.answer("POST jobs", golden("job"), 201)
    options = "--gpus 0.5 --project vision --name night --checkpoint suspend,sigterm"
    options += " --retries 2 --max-run 4h --grace 60"
    options += (
        " --no-borrow --no-move --share yes --no-notify --notify https://chat.example.org/hook --mail --json"
    )
    command = "python train.py --gpus 9 -- -x"
    ran = gpushare("submit", *options.split(), "--env", "SEED=1", "--env", "A=b=c", "--", *command.split())
    assert ran.code == 0
    assert ran.json == golden("job")
    (request,) = broker.asked("POST jobs")
    assert len(request.headers["Idempotency-Key"]) == 32
    assert request.json == {
        "command": ["python", "train.py", "--gpus", "9", "--", "-x"],
        "gpus": "0.5",
        "memory": None,
        "profile": None,
        "project": "vision",
        "name": "night",
        "checkpoint": "suspend,sigterm",
        "borrow": False,
        "move": False,
        "share": True,
        "cwd": str(tmp_path),
        "env": {"SEED": "1", "A": "b=c"},
        "priority": 0,
        "retries": 2,
        "grace_s": 60.0,
        "max_run_s": 14400.0,
        "notify": False,
        "notify_url": "https://chat.example.org/hook",
        "notify_mail": True,
        "source": None,
    }


def test_directory_of_another_machine_is_sent_but_inside_a_server_it_must_exist(
    gpushare, broker, golden, monkeypatch
):
    broker.answer("POST jobs", golden("job"), 201)
    assert gpushare("submit", "--cwd", "/home/ada/elsewhere", "--", "x").code == 0
    assert broker.asked("POST jobs")[0].json["cwd"] == "/home/ada/elsewhere"
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    ran = gpushare("submit", "--cwd", "/home/ada/elsewhere", "--", "x")
    assert ran.code == 2
    assert "no directory '/home/ada/elsewhere'" in ran.err


def test_refusal_has_exit_code_1_and_the_brokers_sentence(gpushare, broker, golden):
    broker.answer("POST jobs", golden("error"), 409)
    ran = gpushare("submit", "--", "x")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "gpushare: No half GPU is free just now; a quarter GPU would start now.\n"
    told = wire.decode(gpushare("submit", "--json", "--", "x").err.encode(), wire.ErrorAnswer)
    assert told == wire.ErrorAnswer(**golden("error") | {"message_texts": []}), "in English only"


def test_wrong_token_is_refused(gpushare, broker):
    ran = gpushare("status", "--token", "wrong")
    assert ran.code == 1
    assert "This token may not." in ran.err


def test_silent_broker_has_exit_code_3(gpushare, broker, monkeypatch):
    monkeypatch.setattr(cli.verbs, "RETRY_S", 0.0)
    broker.stop()
    ran = gpushare("status")
    broker.start()
    assert ran.code == 3
    assert "does not answer" in ran.err


def test_a_restart_of_the_broker_is_waited_for_and_said_once(gpushare, broker, golden, monkeypatch):
    monkeypatch.setattr("jupyter_gpushare.client._PATIENT_S", 0.0)
    broker.stop()
    timer = threading.Timer(0.5, broker.start)
    timer.start()
    ran = gpushare("status")
    timer.join()
    assert ran.code == 0
    assert ran.err.count("does not answer; asking for 30 s") == 1


def test_a_broker_that_the_proxy_does_not_reach_is_asked_again(gpushare, broker, golden):
    class Restarting(dict):
        refusals = 3

        def __getitem__(self, what):
            if self.refusals:
                self.refusals -= 1
                return 503, "Service Unavailable"
            return super().__getitem__(what)

    broker.answer("GET jobs", {"jobs": []})
    broker.answers = Restarting(broker.answers)
    assert gpushare("jobs").code == 0
    assert broker.answers.refusals == 0


def test_submit_waits_until_the_end_and_tells_how_it_went(gpushare, broker, golden):
    broker.answer("POST jobs", golden("job"), 201)
    path = f"GET jobs/{golden('job')['id']}"
    for state, code in (("succeeded", 0), ("failed", 1), ("cancelled", 1)):
        broker.answer(path, golden("job") | {"state": state, "reason": f"It {state}."})
        ran = gpushare("submit", "--wait", "--", "x")
        assert ran.code == code
        assert ran.out == f"k3v9m2x7qa  {state}  It {state}.\n"


def test_cancel_deletes_the_job(gpushare, broker, golden):
    broker.answer(
        "DELETE jobs/k3v9m2x7qa", golden("job") | {"state": "cancelled", "reason": "You cancelled it."}
    )
    assert gpushare("cancel", "k3v9m2x7qa").out == "k3v9m2x7qa  cancelled  You cancelled it.\n"
    assert gpushare("cancel", "k3v9m2x7qa", "--json").json["state"] == "cancelled"
    assert gpushare("cancel", "nosuchjob0").code == 1


# ---- logs --------------------------------------------------------------------


def log_of(tmp_path: Path, attempt: int) -> Path:
    folder = tmp_path / "home" / LOG_PLACE / "k3v9m2x7qa"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"attempt-{attempt}.log"


def test_logs_are_the_users_files_of_all_attempts_in_order(gpushare, broker, golden, tmp_path):
    broker.answer("GET jobs/k3v9m2x7qa", golden("job") | {"state": "succeeded", "attempt": 10})
    for attempt in (10, 2, 1):
        log_of(tmp_path, attempt).write_bytes(f"attempt {attempt}\n".encode())
    ran = gpushare("logs", "k3v9m2x7qa")
    assert ran.code == 0
    assert ran.out == "attempt 1\nattempt 2\nattempt 10\n"
    assert gpushare("logs", "--attempt", "2", "k3v9m2x7qa").out == "attempt 2\n"


def test_logs_keep_bytes_as_they_are_and_json_is_a_line_each(gpushare, broker, golden, tmp_path):
    broker.answer("GET jobs/k3v9m2x7qa", golden("job") | {"state": "succeeded"})
    log_of(tmp_path, 1).write_text("one\ntwo ä\nno end")
    assert gpushare("logs", "k3v9m2x7qa").out == "one\ntwo ä\nno end"
    lines = gpushare("logs", "--json", "k3v9m2x7qa").out.splitlines()
    assert [json.loads(line)["line"] for line in lines] == ["one", "two ä", "no end"]


def test_logs_follow_over_attempts_until_the_job_ends(gpushare, broker, golden, tmp_path):
    broker.answer("GET jobs/k3v9m2x7qa", golden("job"))
    log_of(tmp_path, 1).write_text("step 1\n")

    def go_on() -> None:
        with log_of(tmp_path, 1).open("a") as log:
            log.write("step 2\n")
        log_of(tmp_path, 2).write_text("step 3\n")
        broker.answer("GET jobs/k3v9m2x7qa", golden("job") | {"state": "succeeded", "reason": "Done."})

    timer = threading.Timer(0.3, go_on)
    timer.start()
    ran = gpushare("logs", "-f", "k3v9m2x7qa")
    timer.join()
    assert ran.code == 0
    assert ran.out == "step 1\nstep 2\nstep 3\n"
    assert "k3v9m2x7qa  succeeded  Done." in ran.err


def test_what_a_long_log_left_out_is_said_where_it_is_missing(gpushare, broker, golden, tmp_path):
    broker.answer("GET jobs/k3v9m2x7qa", golden("job") | {"state": "succeeded"})
    log_of(tmp_path, 1).write_text("head\n")
    log_of(tmp_path, 1).with_name("attempt-1.log.000000000001005").write_text("tail\n")
    ran = gpushare("logs", "k3v9m2x7qa")
    assert ran.out == "head\n\n[1000 bytes of this log were not kept]\ntail\n"


def test_logs_are_shown_while_the_broker_is_away(gpushare, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.verbs, "RETRY_S", 0.0)
    log_of(tmp_path, 1).write_text("here\n")
    ran = gpushare("logs", "k3v9m2x7qa", "--url", "http://127.0.0.1:9", "--token", "x")
    assert (ran.code, ran.out) == (0, "here\n")
    assert "does not answer" in ran.err


def test_logs_from_elsewhere_come_from_the_running_jobs_server(gpushare, broker, golden):
    broker.answer("GET jobs/k3v9m2x7qa", golden("job"))
    broker.answers["GET /user/ada/jk3v9m2x7qa-1/log"] = (200, "from afar\n")
    seen_offsets = []

    class Once(dict):
        def __getitem__(self, what):
            if what == "GET /user/ada/jk3v9m2x7qa-1/log":
                offset = int(broker.seen[-1].query["offset"])
                seen_offsets.append(offset)
                return 200, "from afar\n"[offset:]
            return super().__getitem__(what)

    broker.answers = Once(broker.answers)
    ran = gpushare("logs", "k3v9m2x7qa")
    assert (ran.code, ran.out) == (0, "from afar\n")
    assert seen_offsets[:2] == [0, 10]


def test_what_the_disk_did_not_take_of_a_log_is_said_once(gpushare, broker, golden, monkeypatch):
    broker.answer("GET jobs/k3v9m2x7qa", golden("job"))
    held = Held(1, 1234, "Read-only file system", Piece(0, b"line\n"))
    monkeypatch.setattr(job_logs, "held_of", lambda job: held if job == "k3v9m2x7qa" else None)
    monkeypatch.setenv("JUPYTERHUB_USER", "ada")
    ran = gpushare("logs", "k3v9m2x7qa")
    assert ran.out == "line\n"
    assert (
        ran.err.count("1,234 bytes of this log were not written: Read-only file system; the job keeps") == 1
    )


def test_logs_of_a_hub_with_subdomains_are_not_a_lack_of_rights(golden, monkeypatch):
    job = msgspec.convert(golden("job"), wire.Job)
    path = f"/user/{job.user}/{job.server}/log"

    def as_the_hub_answers(request):
        assert request.url.path == path
        return httpx.Response(302, headers={"Location": f"https://hub.test/hub{path}"})

    with httpx.Client(transport=httpx.MockTransport(as_the_hub_answers)) as client:
        monkeypatch.setattr(httpx, "get", lambda url, trust_env, **options: client.get(url, **options))
        apart = job_logs.ProxyLog(job, "https://gpushare--service.hub.test", "token")
        with pytest.raises(Conflict, match="a host of their own"):
            next(apart.read_on())


def test_log_of_an_ended_job_elsewhere_says_where_it_is(gpushare, broker, golden):
    broker.answer("GET jobs/k3v9m2x7qa", golden("job") | {"state": "failed", "server": None})
    ran = gpushare("logs", "k3v9m2x7qa")
    assert ran.code == 1
    assert "/home/ada/.local/share/gpushare/jobs/k3v9m2x7qa/attempt-1.log" in ran.err
    assert "gpushare logs k3v9m2x7qa" in ran.err


def test_a_closed_output_pipe_is_no_error(broker, golden, tmp_path, monkeypatch):
    broker.answer("GET jobs/k3v9m2x7qa", golden("job") | {"state": "succeeded"})
    log_of(tmp_path, 1).write_text("line\n" * 500_000)
    command = [sys.executable, "-m", "jupyter_gpushare.cli", "logs", "k3v9m2x7qa"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_words_and_answers_are_utf_8_in_any_locale(broker, golden, tmp_path, monkeypatch):
    folder = tmp_path / "projé"
    folder.mkdir()
    broker.answer(
        "POST jobs", golden("job") | {"name": "Modèle", "reason": "Wartet auf 1/2 GPU für „nlp“."}, 201
    )
    for name, value in {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    program = [sys.executable, "-P", "-m", "jupyter_gpushare.cli"]
    for told in ([], ["--json"]):
        command = [*program, "submit", *told, "--name", "Modèle", "--", "sh", "-c", "echo héllo"]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Wartet auf 1/2 GPU für „nlp“." in done.stdout
    for asked in broker.asked("POST jobs"):
        assert (asked.json["name"], asked.json["cwd"]) == ("Modèle", str(folder))
        assert asked.json["command"] == ["sh", "-c", "echo héllo"]


@pytest.mark.parametrize(
    ("reason", "lacks"),
    [
        ("It ran to its end. 5 bytes of its log were not written: No space left on device.", True),
        (
            "It ran to its end. 5 bytes of its log were not written: Input/output error. It last printed:\nx",
            True,
        ),
        ("The command ended with exit code 3. It last printed:\nits log of 5 bytes", False),
    ],
)
def test_a_reason_says_whether_its_log_lacks_something(reason: str, lacks: bool) -> None:
    """A program's words do not."""
    assert verbs.lacks_log(messages.reason_texts(reason)) is lacks
