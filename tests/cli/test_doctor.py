from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from jupyter_gpushare.cli import doctor
from jupyter_gpushare.cli.checks import Result, named, ok
from jupyter_gpushare.errors import NotAllowed
from jupyter_gpushare.gpu.driver.known import NOTES, PROGRAMS
from jupyter_gpushare.gpu.leases.files import VERSION
from jupyter_gpushare.native import PRELOAD_NAME
from jupyter_gpushare.protocol import wire
from tests.server.fake_broker import golden
from tests.simulator import Simulator

UUID = "GPU-5f1c0000-0000-4000-8000-000000000001"
HOLDER = {
    "GPUSHARE_LEASE": "b7q2mzk4x9-3",
    "GPUSHARE_LEASE_DIR": "/run/gpushare/leases/b7q2mzk4x9",
    "GPUSHARE_MEMORY_LIMIT": str(40 << 30),
    "CUDA_VISIBLE_DEVICES": UUID,
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "LD_PRELOAD": f"/site/other.so:/opt/lib/{PRELOAD_NAME}",
}
DEVICE = wire.DeviceStatus(
    uuid=UUID,
    name="H100-80GB",
    memory_bytes=80 << 30,
    used_bytes=0,
    utilization_percent=0,
    healthy=True,
    reason="",
    level="preload",
    suspendable=True,
    suspend_reason="",
    held_milli=0,
    claimed_milli=0,
)
AT = "2026-11-22T10:00:00.000Z"
LENDING = wire.Lending(mode="on", configured="on", set_by="", set_at="", tried=12, failed=1, lost=0)
LOST = wire.replace(LENDING, lost=1, last_reason="out of memory", last_at=AT)
DEVICES = wire.Devices(
    devices=[DEVICE], driver="580.65", simulated=False, host_budget_bytes=1 << 38, host_saved_bytes=0
)
LEFT_OUT = "NVIDIA GB10 (GPU-1) is left out: the driver does not say how much memory it has"
RUNGS = [
    wire.Rung(level="whole_gpu", offered=True, reason=""),
    wire.Rung(level="mig", offered=False, reason="the GPU is not in MIG mode"),
    wire.Rung(level="preload", offered=True, reason=""),
    wire.Rung(level="hints", offered=True, reason=""),
]
HEALTH = wire.Health(status="ok", version="0.1", epoch=3, reasons=[])


def changed(value, **fields):
    return msgspec.structs.replace(value, **fields)


STATUS = msgspec.convert(golden("status_active"), wire.Status)


@pytest.fixture
def broker(broker):
    """A broker that is well, with a simulated device."""
    broker.answer("GET health", msgspec.to_builtins(HEALTH))
    broker.answer("GET devices", msgspec.to_builtins(changed(DEVICES, simulated=True)))
    broker.answer("GET lending", msgspec.to_builtins(LENDING))
    return broker


@pytest.fixture
def page(tmp_path):
    """A limit page of 40 GiB on one device, as native/gpushare_lease.h says."""
    path = tmp_path / "limit"
    head = struct.pack("<IIIIII", 0x4C535047, VERSION, 1, 0, 0, 0)
    uuid = bytes.fromhex(UUID[4:].replace("-", ""))
    path.write_bytes((head + struct.pack("<16sQQ16s", uuid, 40 << 30, 0, uuid)).ljust(24 + 16 * 56, b"\0"))
    return path


MAPS = f"7f00-7f01 r-xp 00000000 08:01 1 /opt/lib/{PRELOAD_NAME}\n"
MUSL = f"7f00-7f01 r-xp 0 08:01 1 /lib/ld-musl-x86_64.so.1\n7f02-7f03 r-xp 0 08:01 1 /{PRELOAD_NAME}\n"
HUB = {"JUPYTERHUB_API_URL": "http://127.0.0.1:8081/hub/api"}
CALLBACK = "/user/ada/oauth_callback"
USER = {"JUPYTERHUB_USER": "ada"}
ANY_UID = "2xH100-80GB,checkpoint=any-uid"
# A probe with what it is given, and what it finds; a text that begins with -> is of the advice.
FOUND = [
    (doctor.check_health, (HEALTH,), "ok", ""),
    (doctor.check_health, (changed(HEALTH, sockets_inherited=False),), "warn", "bound its port itself"),
    (
        doctor.check_health,
        (changed(HEALTH, status="degraded", reasons=["The Hub does not answer."]),),
        "warn",
        "The Hub does not answer.",
    ),
    (doctor.check_origin, ({},), "ok", ""),
    (
        doctor.check_origin,
        (HUB | {"JUPYTERHUB_OAUTH_CALLBACK_URL": f"https://ada.hub.test{CALLBACK}"},),
        "ok",
        "",
    ),
    # The Hub sets JUPYTERHUB_HOST for c.JupyterHub.public_url too, where all servers have that one host.
    *(
        (
            doctor.check_origin,
            (HUB | {"JUPYTERHUB_OAUTH_CALLBACK_URL": CALLBACK, "JUPYTERHUB_HOST": host},),
            "warn",
            "-> where users are not trusted, set c.JupyterHub.subdomain_host",
        )
        for host in ("", "https://hub.test")
    ),
    (doctor.check_driver, ("580.65: H100", False), "ok", ""),
    (doctor.check_driver, ("!nvmlInit failed with code 12", True), "warn", "-> the simulated driver"),
    (doctor.check_driver, ("580: H100", True, ANY_UID), "ok", "a real one only root"),
    (doctor.check_driver, ("580: H100", True, "2xH100-80GB"), "ok", "580: H100"),
    (doctor.check_scrubbing, ("EnableMSI: 1\n", False), "ok", ""),
    (doctor.check_scrubbing, ("RmDisableScrubOnFree: 0\n", False), "ok", ""),
    (doctor.check_scrubbing, ('RegistryDwords: "RMDisableScrubOnFree=1;X=2"\n', False), "fail", ""),
    (doctor.check_scrubbing, ("RmDisableScrubOnFree: 1\n", False), "fail", ""),
    (doctor.check_scrubbing, (None, False), "warn", ""),
    (doctor.check_environment, (USER | {"CUDA_VISIBLE_DEVICES": ""}, None), "ok", ""),
    (doctor.check_environment, (USER | {"CUDA_VISIBLE_DEVICES": "0"}, None), "warn", ""),
    (doctor.check_memory_limit, ({}, None), "ok", ""),
    (doctor.check_memory_limit, (USER, 8 << 30), "ok", ""),
    (doctor.check_memory_limit, (USER, None), "warn", "not limited"),
    (doctor.check_preload, (HOLDER, MAPS), "ok", ""),
    (doctor.check_preload, (HOLDER, "7f00-7f01 libc.so.6"), "fail", "was not loaded"),
    (doctor.check_preload, (HOLDER | {"LD_PRELOAD": ""}, MAPS), "fail", "does not name"),
    (doctor.check_preload, (HOLDER, MUSL), "fail", "is musl"),
    (doctor.check_preload, (HOLDER, MUSL), "fail", "-> use an image with glibc"),
    (doctor.check_published, ("570.158.01",), "warn", "issues/34"),
    (doctor.check_published, ("575.51.02",), "warn", "issues/24"),
    (doctor.check_published, ("590.48.01",), "warn", "issues/27"),
    (doctor.check_published, ("595.58.03",), "warn", "issues/27"),
    (doctor.check_published, ("595.71.05",), "warn", "issues/53"),
    (doctor.check_published, ("610.57.04",), "warn", "issues/58"),
    (doctor.check_published, ("580.95.05",), "ok", "issues/44"),
    (doctor.check_lending, (LENDING,), "ok", ""),
    (
        doctor.check_lending,
        (LOST,),
        "warn",
        "12 tried, 1 failed, 1 could not be woken. Last at 2026-11-22 15:30:00: out of memory.",
    ),
    (doctor.check_lending, (LOST,), "warn", "`gpushare admin lending off`"),
    (doctor.check_refusal, (NotAllowed("no such token", reason="login"),), "fail", "expired or was revoked"),
    (doctor.check_refusal, (NotAllowed("no"),), "fail", "c.JupyterHub.extra_user_scopes"),
    (doctor.check_projects, (STATUS, DEVICES), "ok", ""),
    (
        doctor.check_projects,
        (changed(STATUS, projects=[]), DEVICES),
        "fail",
        "-> the administrator adds the user",
    ),
    # Others' projects count too: none of the guarantees can be relied on.
    (doctor.check_projects, (STATUS, changed(DEVICES, guaranteed_milli=99_000)), "warn", "99 GPUs together"),
    (
        doctor.check_projects,
        (STATUS, changed(DEVICES, guaranteed_milli=99_000)),
        "warn",
        "gpushare admin quota",
    ),
]


@pytest.mark.parametrize(("probe", "given", "result", "said"), FOUND)
def test_each_probe_finds_what_is_wrong(probe, given, result, said, india):
    check = probe(*given)
    assert check.result == result
    assert said in f"{check.message} -> {check.advice}"
    assert bool(check.advice) is (result != "ok")
    assert ("root" in check.message) is (probe is doctor.check_driver and ANY_UID in given)


OF_DEVICES = [
    (True, DEVICES, "ok", ""),
    (False, DEVICES, "fail", "device helper does not answer"),
    (True, changed(DEVICES, devices=[]), "fail", "no device"),
    (True, changed(DEVICES, devices=[changed(DEVICE, healthy=False, reason="XID 79")]), "fail", "XID 79"),
    (
        True,
        changed(DEVICES, devices=[changed(DEVICE, suspendable=False, suspend_reason="driver too old")]),
        "warn",
        "driver too old",
    ),
    (True, changed(DEVICES, left_out=[LEFT_OUT]), "warn", LEFT_OUT),
    (True, changed(DEVICES, devices=[], left_out=[LEFT_OUT]), "fail", f"no device. {LEFT_OUT}."),
]


FIXED = changed(DEVICE, move_reason="no other device of the same model")
OF_MOVES = [
    ([changed(DEVICE, movable=True)] * 2, ["What sleeps can resume on another GPU of the same model."]),
    (
        [changed(DEVICE, movable=True), FIXED],
        ["What sleeps on 1 of 2 can resume on its own GPU alone: no other device of the same model."],
    ),
    ([changed(FIXED, suspendable=False)], []),
    ([], []),
]


@pytest.mark.parametrize(("devices", "said"), OF_MOVES)
def test_where_moves_are_possible_is_named(devices, said):
    checks = named({"moves": doctor.check_moves(changed(DEVICES, devices=devices))})
    assert [(check.name, check.message, check.result) for check in checks] == [
        ("moves", text, "ok") for text in said
    ]


@pytest.mark.parametrize(("known", "devices", "result", "said"), OF_DEVICES)
def test_trouble_with_devices_is_named(known, devices, result, said):
    check = doctor.check_devices(changed(STATUS, devices_known=known), devices)
    assert (check.result, said in check.message, bool(check.advice)) == (result, True, result != "ok")


def test_a_setting_that_ends_the_session_is_named_with_its_time():
    lease = STATUS.leases[0]
    assert doctor.check_culling(changed(lease, ends_at=None, ends_by="")) == ()
    check = doctor.check_culling(changed(lease, ends_at="2031-05-06T18:20:00.000Z", ends_by="idle-culler"))
    assert check.result == "warn"
    assert check.message.startswith("idle-culler may end this session or a kernel of it after ")
    unknown = doctor.check_culling(changed(lease, ends_at=None, ends_by="mine"))
    assert (
        unknown.message
        == "mine may end this session or a kernel of it some time; its variables are lost then."
    )


OF_A_HOLDER = [
    ({}, "ok", ""),
    ({"GPUSHARE_LEASE_DIR": ""}, "fail", "GPUSHARE_LEASE_DIR"),
    ({"GPUSHARE_MEMORY_LIMIT": ""}, "warn", "after this terminal"),
    *(
        ({"CUDA_VISIBLE_DEVICES": hides}, "warn", f"CUDA_VISIBLE_DEVICES is {hides!r}")
        for hides in ("1", "-1", "", "GPU-6", "all")
    ),
    *(
        ({"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}, "ok", "")
        for visible in ("0", "0,1", UUID[:9], None)
        for order in ("FASTEST_FIRST", None)
    ),
]


@pytest.mark.parametrize(("change", "result", "said"), OF_A_HOLDER)
def test_only_a_choice_among_the_lease_s_devices_is_no_fault(change, result, said):
    environment = {name: value for name, value in (HOLDER | change).items() if value is not None}
    check = doctor.check_environment(environment, STATUS.leases[0])
    assert (check.result, said in check.message) == (result, True)


def test_driver_is_told_with_persistence_mode_and_what_is_left_out(tmp_path):
    machine = Simulator(tmp_path, "1xH100-80GB+1xGB10-120GB,persistence=off")
    found = subprocess.run(
        [sys.executable, "-c", "from jupyter_gpushare.cli import doctor; print(doctor._driver())"],
        env=machine.env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    gb10 = f"Simulated GB10-120GB ({machine.uuid(1)}) is left out"
    assert f": Simulated H100-80GB (persistence mode off), {gb10}: " in found


def test_a_wrong_setting_of_the_simulated_driver_is_named(tmp_path):
    env = Simulator(tmp_path).env() | {
        "GPUSHARE_SIM_STATE": str(tmp_path / "another"),
        "GPUSHARE_SIMULATE": "2xH100-80GB+host=512GiB",
    }
    code = "from jupyter_gpushare.cli import doctor; print(doctor._driver())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
    check = doctor.check_driver(found, False)
    assert check.result == "warn"
    assert 'GPUSHARE_SIMULATE is wrong at "host=512GiB": it must read like 2xH100-80GB,host' in check.message
    assert check.advice.startswith("correct GPUSHARE_SIMULATE")


def test_on_a_real_driver_doctor_names_the_programs_that_are_not_limited_or_suspended():
    answers = doctor.BrokerAnswers(STATUS, changed(DEVICES, driver="599.10"), LENDING)
    facts = doctor.DoctorFacts(environment={}, broker=ok(""), answers=answers)
    names = ("suspension", "permission", "programs", "maintenance")
    found = named({name: doctor.CHECKS[name](facts) for name in names})
    checks = {check.name: check.message for check in found}
    assert checks.keys() == {"permission", "programs", "maintenance"}
    for name in ("RTLD_DEEPBIND", "AddressSanitizer", "CUPTI", "fabric handles", "musl"):
        assert name in checks["programs"]
    assert "root" in checks["permission"]
    assert checks["maintenance"].startswith("Stop the helper before a driver update, a reset of a GPU")
    assert doctor.check_published("599.10") == ()


def test_the_documentation_has_every_row_of_the_tables():
    text = (Path(__file__).parents[2] / "docs" / "isolation.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for note in NOTES:
        issue = note.source.rpartition("/")[2]
        assert [row for row in rows if note.note.split(" (")[0] in row and note.prefix in row], note
        assert not issue.isdigit() or [row for row in rows if f"issue {issue} " in row], note
    for program in PROGRAMS:
        assert [row for row in rows if program.programs in row and program.note in row], program
    assert "Stop the helper before a driver update, a reset of a GPU" in text


def test_limit_page_that_this_user_could_change_is_a_warning(page, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: True)
    check = doctor.check_limit_page(page, STATUS.leases[0])
    assert check.result is Result.WARN
    assert "40 GiB" in check.message
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert doctor.check_limit_page(page, STATUS.leases[0]).result is Result.OK


def test_limit_page_must_be_there_whole_valid_and_agree_with_the_lease(page, tmp_path):
    lease = STATUS.leases[0]
    assert doctor.check_limit_page(tmp_path / "none", lease).result is Result.FAIL
    good = page.read_bytes()
    for bad in (good[:100], b"\0" * len(good), good[:4] + b"\x09" + good[5:]):
        page.write_bytes(bad)
        assert doctor.check_limit_page(page, lease).result is Result.FAIL
    page.write_bytes(good[:16] + struct.pack("<I", 4) + good[20:])
    assert "has ended" in doctor.check_limit_page(page, lease).message
    page.write_bytes(good)
    assert doctor.check_limit_page(page, changed(lease, memory_limit_bytes=1 << 30)).result is Result.WARN


@pytest.mark.parametrize(
    ("level", "watchdog", "said", "result"),
    [
        ("preload", "stop", "stops processes that evade it", "ok"),
        ("preload", "warn", "reports processes that evade it and stops none", "ok"),
        ("preload", "off", "no watchdog looks", "warn"),
        ("cgroup", "stop", "cgroup: enforced by the driver.", "ok"),
        ("hints", "stop", "not enforced", "warn"),
    ],
)
def test_what_keeps_the_limit_is_said_and_what_the_watchdog_does(level, watchdog, said, result):
    check = doctor.check_level(changed(STATUS.leases[0], level=level), watchdog)
    assert (check.result, said in check.message) == (result, True)
    assert ("evade" in check.message) is (level == "preload")


def test_doctor_reports_all_checks_and_fails_when_one_does(gpushare, broker, monkeypatch, golden):
    ran = gpushare("doctor", "--json")
    assert ran.code == 0
    names = [check["name"] for check in ran.json["checks"]]
    answered, here = (
        ["broker", "token", "devices", "moves", "lending", "projects"],
        ["environment", "origin", "host memory"],
    )
    assert names == [*answered, "driver", "scrubbing", *here]
    for name, value in HOLDER.items():
        if name != "LD_PRELOAD":
            monkeypatch.setenv(name, value)
    ran = gpushare("doctor", "--json")
    assert ran.code == 1
    by_name = {check["name"]: check for check in ran.json["checks"]}
    assert by_name["environment"]["result"] == "ok"
    assert by_name["preload"]["result"] == "fail"
    assert by_name["limit"]["result"] == "fail"
    assert ran.json["ok"] is False
    assert "restart the server" in gpushare("doctor").out


def test_what_cannot_be_examined_keeps_nothing_else_from_it(gpushare, broker, monkeypatch):
    def refuse(_pid: int) -> None:
        raise PermissionError(13, "Permission denied", "/proc/self/cgroup")

    monkeypatch.setattr(doctor, "limit_bytes", refuse)
    found = {check["name"]: check for check in gpushare("doctor", "--json").json["checks"]}
    assert found["host memory"]["result"] == "warn"
    assert found["host memory"]["message"] == "/proc/self/cgroup cannot be examined: Permission denied."
    assert found["origin"]["result"] == "ok"


def test_broker_that_is_degraded_is_a_warning_while_it_answers(gpushare, broker):
    degraded = changed(HEALTH, status="degraded", reasons=["The Hub does not answer."])
    broker.answer("GET health", msgspec.to_builtins(degraded), 503)
    ran = gpushare("doctor", "--json")
    assert ran.code == 0
    assert ran.json["checks"][0]["result"] == "warn"


def test_doctor_without_a_token_says_where_one_comes_from(gpushare, broker, monkeypatch):
    monkeypatch.delenv("GPUSHARE_API_TOKEN")
    ran = gpushare("doctor", "--json")
    assert ran.code == 1
    (token,) = (c for c in ran.json["checks"] if c["name"] == "token")
    assert token["message"].startswith("No token is known here")
    assert "token page" in token["advice"]


@pytest.mark.parametrize(
    "reason",
    [
        "The Hub refuses the broker: off. Remedy: set c.JupyterHub.allow_named_servers = True.",
        "The Hub's spawner cannot start servers with GPUs: /t can be read by others: chmod 600 /t",
        "The preload library is missing, so no server with a GPU can start: not built.",
    ],
)
def test_what_the_administrator_has_to_mend_is_told_to_users_too(gpushare, broker, reason):
    broker.answer(
        "GET health", msgspec.to_builtins(changed(HEALTH, status="degraded", reasons=[reason])), 503
    )
    ran = gpushare("doctor", "--json")
    assert [c["message"] for c in ran.json["checks"] if c["name"] == "broker"] == [reason]


def test_doctor_with_a_wrong_token_says_which_scope_is_needed(gpushare, broker):
    ran = gpushare("doctor", "--token", "wrong")
    assert ran.code == 1
    assert "access:services!service=gpushare" in ran.out


def test_doctor_without_a_broker_still_examines_this_machine(gpushare, monkeypatch):
    ran = gpushare("doctor")
    assert ran.code == 1
    assert "GPUSHARE_API_URL" in ran.out
    assert "environment" in ran.out
    monkeypatch.setattr(
        "jupyter_gpushare.client.BrokerClient.__init__.__kwdefaults__",
        {"certificate": "", "timeout_s": 1, "retry_s": 0, "waiting": None},
    )
    assert gpushare("doctor", "--url", "http://127.0.0.1:9", "--token", "x").code == 3


@pytest.mark.parametrize(
    ("rung", "params", "result", "said"),
    [
        ({"by": "the access list of /dev/nvidia0"}, "ModifyDeviceFiles: 0", "ok", "Closed to users without"),
        ({"by": "the access list of /dev/nvidia0"}, None, "ok", "Closed to users without"),
        ({"by": "the access list of /dev/nvidia0"}, "ModifyDeviceFiles: 1", "warn", "open them for a moment"),
        ({"offered": False, "reason": "/dev/nvidia0 is open to every user"}, None, "warn", "not enforced"),
    ],
)
def test_device_files_that_others_may_open_are_told(rung, params, result, said):
    whole = wire.Rung(**{"level": "whole_gpu", "offered": True, "reason": ""} | rung)
    devices = wire.replace(DEVICES, devices=[wire.replace(DEVICES.devices[0], ladder=[whole])])
    check = doctor.check_device_files(params, devices)
    assert (check.result, said in check.message) == (result, True)
    if rung.get("by"):
        (ladder,) = doctor.check_ladders(devices)
        assert "whole_gpu: yes, by the access list of /dev/nvidia0" in ladder.message
    assert doctor.check_device_files(params, None) == ()


def test_the_ladder_of_each_device_is_told_with_reasons():
    second = changed(DEVICE, uuid="GPU-2", ladder=RUNGS[:2] + RUNGS[3:], level="hints")
    devices = changed(DEVICES, devices=[changed(DEVICE, ladder=RUNGS), second, changed(DEVICE, ladder=[])])
    good, weak = doctor.check_ladders(devices)
    assert good.result is Result.OK
    assert UUID in good.message
    assert "whole_gpu: yes; mig: no, the GPU is not in MIG mode; preload: yes; hints: yes." in good.message
    assert (weak.result, "GPU-2" in weak.message) == (Result.WARN, True)
    assert "isolation.md" in weak.advice
