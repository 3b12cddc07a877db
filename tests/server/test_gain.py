"""A Jupyter server without a GPU gets one while it runs: ``PUT gpushare/leases/own/size`` and its kernels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

LEASE = "b0123456789-1"
NAMED = {"GPUSHARE_LEASE": LEASE, "GPUSHARE_LEASE_DIR": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""}
GIVEN = {**NAMED, "CUDA_VISIBLE_DEVICES": "GPU-1", "GPUSHARE_MEMORY_LIMIT": "1", "LD_PRELOAD": "/tmp/x.so"}
BROKER, PAGE = "PUT leases/b0123456789/size", "gpushare/leases/own/size"
WRITE = "import json, os, pathlib; pathlib.Path({path!r}).write_text(json.dumps(dict(os.environ)))"


async def variables(server, kernel: str, path: Path, execute_request, eventually) -> Mapping[str, str]:
    """Return the environment of a kernel, as a cell sees it."""
    async with server.socket(f"api/kernels/{kernel}/channels") as channels:
        await channels.write_message(execute_request(WRITE.format(path=str(path))))
        eventually(lambda: path.is_file() and path.read_text().endswith("}"))
    found: dict[str, str] = json.loads(path.read_text())
    return found


def new_kernel(server) -> str:
    return str(server.request("POST", "api/kernels", json={"name": "python3"}).json()["id"])


async def test_a_kernel_keeps_the_devices_that_its_program_chose(
    start_both, tmp_path, golden, execute_request, eventually
):
    with start_both(tmp_path, **NAMED) as (broker, server):
        kernel = new_kernel(server)
        done = tmp_path / "done"
        choose = f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = '-1'; open({str(done)!r}, 'w').close()"
        async with server.socket(f"api/kernels/{kernel}/channels") as channels:
            await channels.write_message(execute_request(choose))
            eventually(done.is_file)
        broker.answer(BROKER, golden("status_active")["leases"][0] | {"env": GIVEN})
        assert server.request("PUT", PAGE, json={"gpus": "1/4"}).json()["restart"] == []
        found = await variables(server, kernel, tmp_path / "seen.json", execute_request, eventually)
        assert (found["CUDA_VISIBLE_DEVICES"], found["GPUSHARE_MEMORY_LIMIT"]) == ("-1", "1")


async def test_kernels_that_run_and_those_to_come_see_the_gpu(
    start_both, tmp_path, golden, execute_request, eventually
):
    with start_both(tmp_path, **NAMED) as (broker, server):
        assert server.get("gpushare/status")["may_gain"] is True
        old = new_kernel(server)
        broker.answer(BROKER, golden("status_active")["leases"][0] | {"env": GIVEN})
        answer = server.request("PUT", PAGE, json={"gpus": "1/4", "project": "nlp"}).json()
        assert (answer["size"], answer["restart"], answer["env"]) == ("1/2 GPU", [], {})
        asked = {"gpus": "1/4", "memory": None, "borrow": False, "project": "nlp"}
        assert broker.asked(BROKER)[-1].json == asked
        assert server.get("gpushare/status")["may_gain"] is False
        for number, kernel in enumerate((old, new_kernel(server))):
            path = tmp_path / f"{number}.json"
            found = await variables(server, kernel, path, execute_request, eventually)
            assert (found["CUDA_VISIBLE_DEVICES"], found["GPUSHARE_MEMORY_LIMIT"]) == ("GPU-1", "1")
            # No answer loads code into processes.
            assert found.get("LD_PRELOAD") != "/tmp/x.so"
        # The same size once more tells the kernels nothing.
        again = golden("status_active")["leases"][0] | {"env": GIVEN | {"CUDA_VISIBLE_DEVICES": "GPU-2"}}
        broker.answer(BROKER, again)
        answer = server.request("PUT", "gpushare/leases/b0123456789/size", json={"gpus": "1/4"})
        assert (answer.status_code, answer.json()["env"]) == (200, {})
        server.request("POST", f"api/kernels/{old}/restart")
        found = await variables(server, old, tmp_path / "again.json", execute_request, eventually)
        assert found["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_a_refusal_is_passed_on_and_changes_nothing(start_both, tmp_path):
    with start_both(tmp_path, **NAMED) as (broker, server):
        said = {"status": 409, "reason": "no_capacity", "message": "Full."}
        broker.answer(BROKER, said, 409)
        answer = server.request("PUT", PAGE, json={"gpus": "1/4"})
        assert (answer.status_code, answer.json()["message"]) == (409, "Full.")
        for size in ({}, {"gpus": "much"}, {"gpus": "1/4", "memory": "1GiB"}):
            assert server.request("PUT", PAGE, json=size).status_code in (400, 409)
        assert server.get("gpushare/status")["may_gain"] is True


@pytest.mark.parametrize("given", [{}, {**NAMED, "CUDA_VISIBLE_DEVICES": "GPU-1"}])
def test_a_server_that_has_a_gpu_or_cannot_get_one_asks_nothing(start_both, tmp_path, given):
    with start_both(tmp_path, **given) as (broker, server):
        assert server.get("gpushare/status")["may_gain"] is False
        answer = server.request("PUT", PAGE, json={"gpus": "1/4"})
        assert (answer.status_code, answer.json()["reason"]) == (409, "not_resizable")
        assert not broker.asked(BROKER)
