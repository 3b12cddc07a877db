"""A session becomes larger and smaller while its kernel runs: real Hub, broker, helper, simulated driver."""

from __future__ import annotations

import pytest

from tests.e2e.demo import DemoHub, until
from tests.gpu.machine import WORKER

START = f"""
import subprocess, sys
sys.path.insert(0, {str(WORKER.parent)!r})
import worker
_, context = worker.init()
worker.alloc(8 << 10)
"""
OUT_OF_MEMORY = "2"  # CUDA_ERROR_OUT_OF_MEMORY
FREE = """
failed = sum(worker.cuda.cuMemFree_v2(address) for address, _ in worker.blocks)
worker.blocks.clear()
failed
"""
COMMAND = """
command = [sys.executable, "-m", "jupyter_gpushare.cli", *{words!r}]
done = subprocess.run(command, capture_output=True, text=True)
print(done.returncode, " ".join((done.stdout + done.stderr).split()))
"""


def alloc(gib: int) -> str:
    return f"worker.alloc({gib} << 10)"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_kernel_allocates_more_after_its_server_grew_and_no_more_after_it_shrank(hub: DemoHub) -> None:
    ada, bo = hub.person("ada"), hub.person("bo")
    ada.start_server(fraction="0.25")
    kernel = ada.kernel()
    assert kernel.run(START) == "0"
    pid = kernel.run("import os; os.getpid()")
    assert kernel.run(alloc(20)) == OUT_OF_MEMORY

    # From the server's own terminal or kernel, with the server's own token.
    grown = kernel.run(COMMAND.format(words=["resize", "--gpus", "1/2"]))
    assert grown.startswith("0 This session has 1/2 GPU now (3"), grown
    assert kernel.run(alloc(20)) == "0"
    assert kernel.run("worker.check(context)") == "'ok'"
    assert ada.lease()["fraction_milli"] == 500

    # What its kernels hold does not fit: nothing changes.
    until("the 28 GiB are measured", lambda: ada.lease()["memory_used_bytes"] > 27 << 30)
    kept = kernel.run(COMMAND.format(words=["resize", "--gpus", "1/4"]))
    assert kept.startswith("1 "), kept
    assert "free " in kept
    assert ada.lease()["fraction_milli"] == 500

    # Through the server, as JupyterLab does, it becomes smaller, and is held to that.
    assert kernel.run(FREE) == "0"
    assert kernel.run(alloc(8)) == "0"
    until("the rest is free", lambda: ada.lease()["memory_used_bytes"] < 10 << 30)
    path = f"/user/ada/gpushare/leases/{ada.lease()['id']}/size"
    answer = ada.http.put(path, json={"gpus": "1/4"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["size"] == "1/4 GPU"
    assert kernel.run(alloc(20)) == OUT_OF_MEMORY
    assert kernel.run(alloc(4)) == "0"
    assert kernel.run("worker.check(context)") == "'ok'"
    assert kernel.run("os.getpid()") == pid

    # Another user's session is not there.
    refused = bo.http.put(f"/services/gpushare/api/v1/leases/{ada.lease()['id']}/size", json={"gpus": "1"})
    assert refused.status_code == 404
