"""Kill a caller while the driver moves memory: the driver's state, and the reaction of the next helper.

CRIU's pull request 2547 names this as a way to get driver and process out of step.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from jupyter_gpushare.gpu.driver.checkpoint import ProcessState
from tests.gpu.machine import GIB, MIB, until
from tests.gpu_real.direct import ANSWER_S, bring_back, checkpoint_of, park, says, states_of
from tests.gpu_real.site import CALL_S, ROOT, Helper, Site, do, end

# The maximum seconds for a process to read its memory.
READ_S = 30.0
# The maximum seconds for a helper to bring a process to rest, or to give it up (`moves.steps.copy_s`).
REST_S = 60.0

CALLER = """
import sys
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
call = getattr(Checkpoint(), sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
call(int(sys.argv[2]), 60.0)
print("done", flush=True)
"""


def killed_in(site: Site, name: str, pid: int, after_s: float) -> str:
    """Make a call in a process that is killed ``after_s`` later; return whether the call had returned."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, name, str(pid)],
        cwd=ROOT, env=site.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert caller.stdin
    assert caller.stdout
    assert caller.stdout.readline() == "ready\n"
    caller.stdin.write("\n")
    caller.stdin.flush()
    time.sleep(after_s)
    end(caller)
    with caller.stdin, caller.stdout:
        return "after its return" if "done" in caller.stdout.read() else "in the call"


def half_of(call: Callable[..., object], *given: object) -> float:
    """Return half of the seconds that a call takes."""
    began = time.monotonic()
    call(*given)
    return (time.monotonic() - began) / 2


def a_caller_is_killed_in_a_move(site: Site) -> None:
    """Kill the caller half-way in Checkpoint and in Restore: report the driver's states and codes."""
    checkpoint, size = checkpoint_of(site), 4 * site.scale_bytes
    site.needs_memory(size)
    worker = site.worker("driver", site.lease("caller", size + 2 * GIB, preload=False))
    pid = worker.pid
    assert do(worker, f"fill {size // MIB}") == "0"
    checkpoint.lock(pid, CALL_S)
    after_s = {name: half_of(getattr(checkpoint, name), pid, CALL_S) for name in ("checkpoint", "restore")}
    for name in after_s:
        if name == "restore":
            park(checkpoint, pid)
        killed = killed_in(site, name, pid, after_s[name])
        states = states_of(checkpoint, pid, 1.0 + 4 * after_s[name])
        codes = bring_back(checkpoint, pid)
        is_back = codes.endswith(f"({ProcessState.RUNNING.name})")
        kept = says(worker, "verify", READ_S if is_back else ANSWER_S)
        site.report.add(
            f"caller killed in {name} after {after_s[name]:.2f} s: when, states since; undone by; memory",
            f"{killed}, {states}; {codes}; {kept}",
        )
        if not is_back:
            break
    site.end(worker)


def a_helper_is_killed_in_a_move(site: Site) -> None:
    """Kill a second helper, with a separate folder, half-way in a suspension and in a resume."""
    site.needs_suspending()
    size, folder = 4 * site.scale_bytes, site.folder / "second"
    site.needs_memory(size)
    folder.mkdir(exist_ok=True)
    helper = Helper(folder, site.environment, site.sample_s)
    own = Site(folder, site.environment, site.report, scale_bytes=site.scale_bytes, sample_s=site.sample_s)
    try:
        own.needs_suspending()
        worker = own.worker("driver", own.lease("moved", size + 2 * GIB))
        assert do(worker, f"fill {size // MIB}") == "0"
        until(lambda: own.sees("moved", worker.pid), "its memory", CALL_S)
        after_s = {verb: helper.ask(verb, lease="moved")["took_s"] / 2 for verb in ("suspend", "resume")}
        for verb in after_s:
            if verb == "resume":
                assert helper.ask("suspend", lease="moved")["done"]
            asked = threading.Thread(target=_ask, args=(helper, verb))
            asked.start()
            time.sleep(after_s[verb])
            helper.kill()
            asked.join()
            began, helper = time.monotonic(), Helper(folder, site.environment, site.sample_s)
            phase, took_s = _phase_at_rest(helper), time.monotonic() - began
            back = helper.ask("resume", lease="moved")
            kept = says(worker, "verify", READ_S if back["done"] else ANSWER_S)
            site.report.add(
                f"helper killed in {verb} after {after_s[verb]:.2f} s: the next one's answer, resume, memory",
                f"{phase} {took_s:.1f} s later, {back['reason'] or 'done'}, {kept}",
            )
            if phase == "lost":
                break
            assert back["done"], back
            assert kept == "ok"
    finally:
        own.close()
        helper.clear(READ_S)
        helper.close()


def _ask(helper: Helper, verb: str) -> None:
    with suppress(AssertionError, OSError):
        helper.ask(verb, lease="moved")


def _phase_at_rest(helper: Helper) -> str:
    def phase() -> str:
        return str(helper.ask("sample")["leases"][0]["phase"])

    ends_at = time.monotonic() + REST_S
    while phase() not in ("running", "suspended", "lost") and time.monotonic() < ends_at:
        time.sleep(0.2)
    return phase()
