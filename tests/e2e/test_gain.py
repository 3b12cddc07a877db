"""A server without a GPU gets one while it runs: real Hub, broker, helper, kernels, simulated driver."""

from __future__ import annotations

import pytest

from tests.e2e.demo import DemoHub, until
from tests.e2e.test_resize import OUT_OF_MEMORY, START, alloc

NO_DEVICE = "100"  # CUDA_ERROR_NO_DEVICE
VISIBLE = "import os; os.environ['CUDA_VISIBLE_DEVICES']"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kernels_that_run_see_the_gpu_that_their_server_gets(hub: DemoHub) -> None:
    ada = hub.person("ada")
    ada.start_server()
    assert not ada.ask("status")["leases"]
    assert ada.http.get("/user/ada/gpushare/status").json()["may_gain"] is True
    plain, looked = ada.kernel(), ada.kernel()
    assert plain.run("mine = 41; os_pid = __import__('os').getpid(); os_pid") != ""
    pid = plain.run("os_pid")
    assert looked.run(START + "\nprint(worker.init()[0])").endswith(NO_DEVICE)

    # More than the project is guaranteed is borrowed only where the request allows it.
    path = "/user/ada/gpushare/leases/own/size"
    refused = ada.http.put(path, json={"gpus": "2"})
    assert refused.status_code == 409, refused.text
    assert not ada.ask("status")["leases"]

    answer = ada.http.put(path, json={"gpus": "1/4"})
    assert answer.status_code == 200, answer.text
    gained = answer.json()
    assert (gained["size"], gained["restart"]) == ("1/4 GPU", ["python3"])
    assert gained["memory_limit_bytes"] == ada.lease()["memory_limit_bytes"]
    until("the session runs", lambda: ada.state() == "running")
    assert ada.http.get("/user/ada/gpushare/status").json()["may_gain"] is False
    again = ada.http.put(path, json={"gpus": "1/4"})
    assert (again.status_code, again.json()["reason"]) == (409, "not_resizable")

    # The kernel goes on, with its variables, and is held to its part.
    assert plain.run(VISIBLE).strip("'").startswith("GPU-")
    assert plain.run(START) == "0"
    assert plain.run("worker.check(context)") == "'ok'"
    assert plain.run(alloc(20)) == OUT_OF_MEMORY
    assert (plain.run("mine"), plain.run("os_pid")) == ("41", pid)
    until("its memory is counted", lambda: ada.lease()["memory_used_bytes"] > 7 << 30)

    # One that looked before sees it after a restart; a new one at once.
    assert ada.http.post(f"/user/ada/api/kernels/{looked.id}/restart").status_code == 200
    looked.disconnect()
    assert looked.run(START).endswith("0")
    late = ada.kernel()
    assert late.run(VISIBLE).strip("'").startswith("GPU-")

    # It is a session like others: it ends with its server.
    ada.stop_server()
    until("the lease is released", lambda: not ada.ask("status")["leases"])
