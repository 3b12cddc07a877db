"""The driver's checkpoint calls for scenarios without the helper, and NVML's view of them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint, ProcessState
from jupyter_gpushare.gpu.driver.nvml import Nvml
from tests.gpu.machine import MIB, Worker
from tests.gpu_real.site import CALL_S, Site, Skip

# The maximum seconds for the answer of a process that may not have survived.
ANSWER_S = 8.0
# Since CUDA 13.1; earlier drivers show the state before.
MOVING = (ProcessState.CHECKPOINTING.name, ProcessState.RESTORING.name)


def checkpoint_of(site: Site) -> Checkpoint:
    """Return the checkpoint calls; skip if the driver has none, or refuses them on this device."""
    checkpoint = Checkpoint()
    if checkpoint.unavailable:
        raise Skip(checkpoint.unavailable)
    if site.device["profile"]:
        raise Skip("the driver cannot checkpoint on MIG")
    return checkpoint


def move_of(site: Site) -> Callable[[Site, str, Worker], tuple[float, float]]:
    """Return the function that suspends and wakes a process on this machine; it returns both times."""
    return by_the_helper if site.device["suspendable"] else by_the_driver


def by_the_helper(site: Site, name: str, _worker: Worker) -> tuple[float, float]:
    """Suspend and resume a lease at rest, through the helper."""
    moved = site.ask("suspend", lease=name, calls=site.rests(name))
    assert moved["done"], moved
    back = site.ask("resume", lease=name)
    assert back["done"], back
    return moved["took_s"], back["took_s"]


def by_the_driver(site: Site, _name: str, worker: Worker) -> tuple[float, float]:
    """Do the same with the driver's own calls, for a process that makes no calls meanwhile."""
    checkpoint = checkpoint_of(site)
    began = time.monotonic()
    checkpoint.lock(worker.pid, CALL_S)
    checkpoint.checkpoint(worker.pid, CALL_S)
    parked = time.monotonic()
    checkpoint.restore(worker.pid, CALL_S)
    checkpoint.unlock(worker.pid)
    return parked - began, time.monotonic() - parked


def code_of(call: Callable[..., object], *given: object) -> str:
    """Return the code of a driver call."""
    try:
        call(*given)
    except DeviceError as error:
        return str(error.code)
    return "0"


def state_of(checkpoint: Checkpoint, pid: int) -> str:
    """Return the driver's state of a process, or the code of the query."""
    try:
        return checkpoint.state(pid).name
    except DeviceError as error:
        return f"code {error.code}"


def states_of(checkpoint: Checkpoint, pid: int, for_s: float) -> str:
    """Return the states of a process within ``for_s``, or longer while the driver reports a move."""
    began, seen = time.monotonic(), [state_of(checkpoint, pid)]
    while (past_s := time.monotonic() - began) < for_s or (seen[-1] in MOVING and past_s < CALL_S):
        time.sleep(0.01)
        if (state := state_of(checkpoint, pid)) != seen[-1]:
            seen.append(state)
    return " > ".join(seen)


def park(checkpoint: Checkpoint, pid: int) -> str:
    """Lock and checkpoint a process; return the codes and the state afterwards."""
    codes = f"Lock {code_of(checkpoint.lock, pid, CALL_S)}"
    if state_of(checkpoint, pid) == ProcessState.LOCKED.name:
        codes += f", Checkpoint {code_of(checkpoint.checkpoint, pid, CALL_S)}"
    return f"{codes} ({state_of(checkpoint, pid)})"


def bring_back(checkpoint: Checkpoint, pid: int) -> str:
    """Restore and unlock a process, each if its state needs it; return the codes and the final state."""
    codes = []
    if state_of(checkpoint, pid) == ProcessState.CHECKPOINTED.name:
        codes.append(f"Restore {code_of(checkpoint.restore, pid, CALL_S)}")
    if state_of(checkpoint, pid) == ProcessState.LOCKED.name:
        codes.append(f"Unlock {code_of(checkpoint.unlock, pid)}")
    return f"{', '.join(codes) or 'nothing to undo'} ({state_of(checkpoint, pid)})"


def says(worker: Worker, command: str, within_s: float = ANSWER_S) -> str:
    """Return the answer of a possibly damaged process, "no answer" if it hangs, or how it ended."""
    answer = ""
    with suppress(BrokenPipeError):
        worker.tell(command)
        answer = worker.answer(within_s)
    verb, _, found = answer.partition(" ")
    if verb == command.split()[0]:  # and not what it was asked before
        return found
    try:
        return f"ended with status {worker.process.wait(0.5)}"
    except subprocess.TimeoutExpired:
        return "no answer"


def mib(count: int | None) -> str:
    """Return a number of bytes as text for a row; None means that NVML hides them."""
    return "hidden" if count is None else f"{count / MIB:.0f} MiB"


def listed(nvml: Nvml, uuid: str, pid: int) -> str:
    """Return the entry of a process in NVML's list of a device."""
    processes = nvml.processes(uuid)
    return mib(processes[pid]) if pid in processes else "not listed"


def lags(most_s: float, **conditions: Callable[[], bool]) -> dict[str, str]:
    """Return the time until each condition is true, by name; poll all every millisecond."""
    began, found = time.monotonic(), dict.fromkeys(conditions, f"not within {most_s:.0f} s")
    waiting = dict(conditions)
    while waiting and time.monotonic() - began < most_s:
        for name, condition in [*waiting.items()]:
            if condition():
                found[name] = f"{1e3 * (time.monotonic() - began):.0f} ms"
                del waiting[name]
        time.sleep(0.001)
    return found
