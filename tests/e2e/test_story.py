"""The story: half a GPU, idle, lent, given back; told by real kernels and a real browser.

Set GPUSHARE_PICTURES to a folder to keep the pictures of the browser there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.demo import DemoHub, Kernel, Person, Refused, until
from tests.ui.pages import AXE, sign_in
from tests.waiting import PATIENCE_S

GB = 1 << 30
ALLOCATE = """
from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
weights = gpu.allocate("6GiB")
weights.fill(seed=42)
print(weights.is_intact(), gpu.memory()[1])
"""
TOO_MUCH = """
try:
    gpu.allocate("40GiB")
except demo_gpu.GpuOutOfMemory as error:
    print("clean:", error)
"""


@pytest.fixture
def hub(shared_hub: DemoHub) -> DemoHub:
    """One demo hub for the tests of this file."""
    return shared_hub


def picture(page: Page, name: str) -> None:
    folder = os.environ.get("GPUSHARE_PICTURES")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def spawn_in_browser(hub: DemoHub, browser: Browser, name: str, label: str) -> None:
    """Log in, pick a size on the spawn page, and wait for JupyterLab."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    sign_in(page, f"{hub.url}/hub/spawn", name)
    card = page.get_by_role("radio", name=label, exact=True).first
    card.wait_for()
    card.check()
    picture(page, "spawn-page")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(f"**/user/{name}/lab**", timeout=1000 * PATIENCE_S)
    page.wait_for_selector("#jp-main-dock-panel", timeout=1000 * PATIENCE_S)
    picture(page, "lab")
    page.close()


def is_asleep(person: Person) -> bool:
    return person.state() == "suspended"


TRAIN = """
from pathlib import Path
from jupyter_gpushare import demo_gpu
gpus = [demo_gpu.open(number) for number in range(demo_gpu.device_count())]
buffers = [gpu.allocate("10GiB") for gpu in gpus]
for number, buffer in enumerate(buffers):
    buffer.fill(seed=number)
with open("steps.txt", "a") as steps:
    while not Path("enough").exists():
        demo_gpu.train(buffers, 1, 0.1)
        print(buffers[0].steps, file=steps, flush=True)
assert all(buffer.is_intact() for buffer in buffers)
print("devices", len(gpus), "steps", buffers[0].steps)
"""


CHOOSE = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '{}'"
ON_FIRST = """
from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
weights = gpu.allocate("1GiB")
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
print(pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetIndex(handle))
"""


def submit(bo: Person, folder: Path) -> dict[str, Any]:
    """Submit a job for both GPUs that trains until the file ``enough`` is there."""
    (folder / "train.py").write_text(TRAIN)
    command = ["--cwd", str(folder), "--", sys.executable, "train.py"]
    done = bo.gpushare("submit", "--json", "--gpus", "2", "--name", "both", *command)
    job: dict[str, Any] = json.loads(done.stdout)
    return job


def steps_done(folder: Path) -> list[int]:
    path = folder / "steps.txt"
    return [int(line.split()[0]) for line in path.read_text().split("\n") if line] if path.exists() else []


def bytes_of(hub: DemoHub, pid: int) -> int:
    """Return a process's device memory, as the ledger of the driver has it."""
    held = 0
    for entry in hub.ledger():
        if entry["pid"] == pid and entry["event"] in ("alloc", "context", "restore"):
            held += entry["bytes"]
        elif entry["pid"] == pid and entry["event"] in ("free", "checkpoint"):
            held -= entry["bytes"]
    return held


def allocations(hub: DemoHub, pid: int) -> list[tuple[int, int]]:
    """Return a process's allocations of 1 GiB and more, as (device of the machine, bytes)."""
    own = (entry for entry in hub.ledger() if entry["pid"] == pid and entry["event"] == "alloc")
    return [(entry["device"], entry["bytes"]) for entry in own if entry["bytes"] >= 1 << 30]


def never_more_than_there_is(hub: DemoHub) -> None:
    peak = max((e["device_used"] for e in hub.ledger() if "device_used" in e), default=0)
    assert 0 < peak <= 80 * GB, peak


def nothing(_hub: DemoHub, _ada: Person, _kernel: Kernel) -> None:
    """The story as it is."""


def the_hub_dies(hub: DemoHub, ada: Person, kernel: Kernel) -> None:
    """kill -9 the Hub, then start it again: servers and jobs live on."""
    kernel.disconnect()
    hub.kill_hub()
    hub.start()
    until("the Hub has adopted ada's server", lambda: ada.server_ready())


def the_broker_dies(hub: DemoHub, ada: Person, _kernel: Kernel) -> None:
    """kill -9 the broker: its parent starts it again."""
    before = ada.ask("health")["epoch"]
    hub.kill_broker()
    until("a new broker answers", lambda: _epoch(ada) > before)


def _epoch(person: Person) -> int:
    answer = person.http.get("/services/gpushare/api/v1/health")
    return int(answer.json().get("epoch", 0)) if answer.status_code == 200 else 0


@pytest.mark.browser
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "interruption",
    [nothing, *(pytest.param(dies, marks=pytest.mark.long) for dies in (the_hub_dies, the_broker_dies))],
)
def test_ada_sleeps_for_bos_job_and_gets_everything_back(
    hub: DemoHub,
    browser: Browser,
    tmp_path: Path,
    interruption: Callable[[DemoHub, Person, Kernel], None],
) -> None:
    ada, bo = hub.person("ada"), hub.person("bo")
    spawn_in_browser(hub, browser, "ada", "1/2 GPU")

    # She allocates within her half, and gets a clean error beyond it, over two kernels together.
    kernel, second = ada.kernel(), ada.kernel()
    intact, total = kernel.run(ALLOCATE).split()
    assert intact == "True"
    assert 38 * GB < int(total) < 40 * GB
    assert kernel.run(TOO_MUCH).startswith("clean:")
    assert second.run(ALLOCATE.replace("6GiB", "28GiB")).startswith("True")
    assert kernel.run(TOO_MUCH.replace("40GiB", "5GiB")).startswith("clean:")
    ada.http.delete(f"/user/ada/api/kernels/{second.id}")
    pid = int(kernel.run("import os; os.getpid()"))
    assert bytes_of(hub, pid) >= 6 << 30

    # Bo needs both GPUs: he waits until she is idle, then her bytes leave the device.
    # A panel in her page asks for the use of her kernel all the time.
    job = submit(bo, tmp_path)
    assert job["state"] == "queued"
    until("ada sleeps", lambda: kernel.ask_usage() or is_asleep(ada))
    until("the job runs", lambda: bo.job(job["id"])["state"] == "running")
    assert bytes_of(hub, pid) == 0
    until("the job makes steps", lambda: len(steps_done(tmp_path)) > 3)

    interruption(hub, ada, kernel)
    until("ada still sleeps", lambda: is_asleep(ada))

    # A cell without GPU runs at once and wakes no session.
    assert kernel.run("sum(range(10))") == "45"
    assert is_asleep(ada)

    # A GPU cell: the job is suspended, her memory is restored and intact.
    assert kernel.run("weights.is_intact()", timeout_s=PATIENCE_S) == "True"
    assert bytes_of(hub, pid) >= 6 << 30
    until("she is awake", lambda: ada.state() == "running")
    paused = until("the job is paused", lambda: (j := bo.job(job["id"]))["state"] == "suspended" and j)
    assert "the session that lent the GPU needs it" in paused["reason"]
    assert paused["attempt"] == 1
    before = len(steps_done(tmp_path))

    # She idles again; the job resumes where it was, and ends with every step done exactly once.
    until("the job goes on", lambda: len(steps_done(tmp_path)) > before + 3)
    (tmp_path / "enough").touch()
    done = until("the job ends", lambda: (j := bo.job(job["id"]))["exit_code"] is not None and j)
    assert (done["state"], done["exit_code"], done["attempt"]) == ("succeeded", 0, 1), done
    steps = steps_done(tmp_path)
    assert steps == list(range(1, len(steps) + 1))
    assert f"devices 2 steps {len(steps)}" in bo.gpushare("logs", job["id"]).stdout
    assert kernel.run("weights.is_intact()", timeout_s=PATIENCE_S) == "True"
    never_more_than_there_is(hub)


def test_a_job_outlives_its_owners_server_and_is_stopped_with_grace(hub: DemoHub, tmp_path: Path) -> None:
    bo = hub.person("bo")
    bo.start_server(gpus=0)
    job = submit(bo, tmp_path)
    until("the job runs", lambda: bo.job(job["id"])["state"] == "running")
    bo.stop_server()
    until("the job makes steps", lambda: len(steps_done(tmp_path)) > 3)
    assert bo.gpushare("cancel", job["id"]).returncode == 0
    until("the job is cancelled", lambda: bo.job(job["id"])["state"] == "cancelled")
    until("its room is free", lambda: all(d["used_bytes"] == 0 for d in bo.ask("devices")["devices"]))


def test_a_terminal_and_a_notebook_need_no_token_to_submit_follow_and_look(hub: DemoHub) -> None:
    bo = hub.person("bo")
    bo.start_server(fraction="0.5")
    shell = bo.terminal()
    words = shell.run("gpushare submit --gpus 1 --name 'six times seven' -- python -c 'print(6 * 7)'")
    assert "six times seven" in words, words
    (job,) = [job for job in bo.ask("jobs")["jobs"] if job["name"] == "six times seven"]
    assert "42" in shell.run(f"gpushare logs -f {job['id']}")
    until("the job ends", lambda: bo.job(job["id"])["state"] == "succeeded")
    assert job["id"] in shell.run("gpushare jobs")
    assert "held by preload" in shell.run("gpushare status")
    (held,) = bo.ask("leases")["leases"]
    assert (held["size"], held["level"]) == ("1/2 GPU", "preload")
    kernel = bo.kernel()
    assert "1/2 GPU of" in kernel.run("%gpu")
    said = kernel.run("%%gpujob --gpus 0.5\nprint(7 * 11)")
    (job,) = [job for job in bo.ask("jobs")["jobs"] if job["name"] == "cell"]
    assert job["id"] in said
    until("the cell's job ends", lambda: bo.job(job["id"])["state"] == "succeeded")
    assert "77" in shell.run(f"gpushare logs {job['id']}")
    # The broker knows from the Hub where the server is that can release a kernel.
    path = f"/services/gpushare/api/v1/leases/{held['id']}/kernels/{{}}/release"
    assert bo.http.post(path.format("none"), follow_redirects=True).status_code == 404
    assert bo.http.post(path.format(kernel.id), follow_redirects=True).status_code == 200


def test_a_lease_numbers_its_devices_itself(hub: DemoHub, tmp_path: Path) -> None:
    """A notebook, a kernelspec and a script say "0" where the lease lies on the machine's device 1."""
    ada, bo, cy = (hub.person(name) for name in ("ada", "bo", "cy"))
    logged = len(hub.log.read_bytes())
    bo.start_server(fraction="0.5")
    cy.start_server(fraction="0.6", project="vision")
    second = bo.ask("devices")["devices"][1]["uuid"]
    holder = next(each for each in (bo, cy) if each.lease()["devices"] == [second])

    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    spec |= {"display_name": "Both GPUs", "language": "python", "env": {"CUDA_VISIBLE_DEVICES": "0,1"}}
    folder = hub.folder / "state/home" / holder.name / ".local/share/jupyter/kernels/both"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    for kernel, cell in ((holder.kernel(), CHOOSE.format("0")), (holder.kernel("both"), "import os")):
        pid = int(kernel.run(f"{cell}\nos.getpid()"))
        assert kernel.run(ON_FIRST) == "1 0"
        assert allocations(hub, pid) == [(1, 1 << 30)]
    kernel = holder.kernel()
    pid = int(kernel.run(f"{CHOOSE.format('-1')}\nos.getpid()"))
    assert "CUDA_ERROR_NO_DEVICE" in kernel.run(ON_FIRST)
    assert allocations(hub, pid) == []

    # A job that fits on that device only.
    holder.stop_server()
    until("its lease ends", lambda: not holder.ask("status")["leases"])
    (tmp_path / "train.py").write_text(f"{CHOOSE.format('0')}\n{ON_FIRST}print(os.getpid())")
    command = ["--cwd", str(tmp_path), "--", sys.executable, "train.py"]
    job = json.loads(ada.gpushare("submit", "--json", "--gpus", "0.6", *command).stdout)
    until("the job ends", lambda: ada.job(job["id"])["state"] == "succeeded")
    *seen, pid_of_job = ada.gpushare("logs", job["id"]).stdout.split()
    assert (seen, allocations(hub, int(pid_of_job))) == (["1", "0"], [(1, 1 << 30)])
    assert b"its limit is" not in hub.log.read_bytes()[logged:]


@pytest.mark.long
def test_ctrl_c_ends_the_demo_soon_though_a_job_runs(hub: DemoHub, tmp_path: Path) -> None:
    bo = hub.person("bo")
    job = submit(bo, tmp_path)
    until("the job makes steps", lambda: len(steps_done(tmp_path)) > 3)
    until("the Hub says so too", lambda: bo.job(job["id"])["state"] == "running")
    hub.stop(within_s=40)
    until("nothing is left", lambda: not hub.processes())


@pytest.mark.long
def test_the_hub_refuses_a_forged_start_of_a_job(hub: DemoHub) -> None:
    bo = hub.person("bo")
    answer = bo.http.post("/hub/api/users/bo/servers/jaaaaaaaaaa-1", json={})
    assert answer.status_code == 409, answer.text
    assert "gpushare submit" in answer.json()["message"]


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.timeout(300)
def test_only_an_admin_changes_a_quota(hub: DemoHub, browser: Browser) -> None:
    admin, ada = hub.person("admin"), hub.person("ada")
    with pytest.raises(Refused, match="403"):
        ada.ask("projects/vision", "PUT", json={"quota": 2})
    changed = {p["name"]: p for p in admin.ask("projects/vision", "PUT", json={"quota": 0.5})["projects"]}
    assert (changed["vision"]["quota_milli"], changed["vision"]["overridden"]) == (500, True)
    assert (changed["nlp"]["quota_milli"], changed["nlp"]["overridden"]) == (1000, False)
    page = browser.new_page()
    sign_in(page, f"{hub.url}/services/gpushare/", "admin")
    page.get_by_role("link", name="Change project nlp").click()
    page.get_by_label("guaranteed GPUs").fill("0.5")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("row", name="nlp 0.5 (changed)")).to_be_visible(timeout=60_000)
    # What another site has the browser send lacks the token that is in the form.
    form = {"project": "nlp", "quota": "0"}
    assert page.request.post(f"{hub.url}/services/gpushare/", form=form).status in (401, 403)
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    assert not [v["id"] for v in found if v["impact"] in ("serious", "critical")]
    uses = {p["name"]: p["quota_milli"] for p in admin.ask("projects")["projects"]}
    assert uses == {"vision": 500, "nlp": 500}


# The last one: what follows would need another hub.
def test_without_a_broker_the_page_says_so_and_a_server_without_gpu_starts(hub: DemoHub) -> None:
    hub.kill("broker", "helper")
    cy = hub.person("cy")
    assert "No GPU" in cy.first_page
    assert "cannot be asked just now" in cy.first_page or "does not answer" in cy.first_page
    cy.start_server()
    kernel = cy.kernel()
    assert kernel.run("import os; repr(os.environ['CUDA_VISIBLE_DEVICES'])") == "\"''\""
