"""The self-test of one device: does a process survive suspension, does the limit hold?

A child of our own holds 64 MiB in a lease of its own, goes through a full cycle,
and reads its memory back.  Suspending is offered only where the bytes came back
the same, because a driver that breaks them (or a platform that cannot: MIG, MPS,
some virtual GPUs) would break a user's kernel next.  The same child asks for more
than its limit: only where that is denied the library's level is claimed.

A verdict holds for one boot and one driver.  A helper that starts again while the
devices are full uses the kept one: there may be no room to test.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import native
from ..errors import DeviceError, GpuShareError, InvalidRequest
from . import verbs
from .bounded import TIMED_OUT
from .checkpoint import Checkpoint
from .isolation import LeaseDirectory, PagePhase
from .nvml import Gpu, Nvml
from .verbs import Level

log = logging.getLogger(__name__)

CANARY_BYTES = 64 << 20
# Within the limit once, not twice.
LIMIT_BYTES = CANARY_BYTES + CANARY_BYTES // 2
# A context, the pattern, and some air.
ROOM_BYTES = 1 << 30
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the self-test found on one device."""

    suspendable: bool
    reason: str = ""
    level: Level = Level.HINTS
    suspend_bytes_per_s: int = 0
    resume_bytes_per_s: int = 0
    final: bool = True  # False: it could not be tested now, ask again


def kept(verdicts: dict[str, Any], key: str, uuid: str) -> Verdict | None:
    """The verdict that was kept for this boot and driver (``key``), if there is one."""
    if verdicts.get("key") != key:
        return None
    try:
        return verbs.build(Verdict, verdicts["devices"][uuid])
    except (KeyError, TypeError, InvalidRequest):
        return None


def keep(key: str, verdicts: dict[str, Verdict]) -> dict[str, Any]:
    """What to keep for `kept`."""
    return {"key": key, "devices": {uuid: asdict(each) for uuid, each in verdicts.items() if each.final}}


def examine(
    gpu: Gpu, *, nvml: Nvml, checkpoint: Checkpoint, leases: Path, ours: Callable[[int], None]
) -> Verdict:
    """The verdict on one device; takes seconds on a real one.  ``ours`` is told the child's pid."""
    if gpu.mig:
        return Verdict(suspendable=False, reason="the driver cannot checkpoint on MIG", level=Level.MIG)
    try:
        if nvml.free_bytes(gpu.uuid) < min(ROOM_BYTES, gpu.memory_bytes // 4):
            return Verdict(suspendable=False, reason="no room on the device for the self-test", final=False)
        return _examine(gpu, nvml, checkpoint, leases, ours)
    except (DeviceError, OSError, _Failed) as error:
        log.warning("device=%s self-test failed: %s", gpu.uuid, error)
        hung = isinstance(error, DeviceError) and error.code == TIMED_OUT
        return Verdict(suspendable=False, reason=f"self-test failed: {error}", final=not hung)


class _Failed(Exception):
    pass


def _examine(
    gpu: Gpu, nvml: Nvml, checkpoint: Checkpoint, leases: Path, ours: Callable[[int], None]
) -> Verdict:
    files = LeaseDirectory(leases, f"canary-{secrets.token_hex(8)}")
    try:
        files.create(os.geteuid(), {gpu.uuid: LIMIT_BYTES}, PagePhase.RUNNING)
        child = _start(gpu, files)
        ours(child.pid)
        try:
            _, digest, code, denied = _answer(child, START_TIMEOUT_S, "ready", 4)
            if code != "0":
                raise _Failed(f"the child could not write its memory (code {code})")
            level = Level.PRELOAD if denied == "2" else Level.HINTS  # CUDA_ERROR_OUT_OF_MEMORY
            return _cycle(child, digest, level, gpu, nvml, checkpoint)
        finally:
            child.kill()
            child.communicate()
    finally:
        files.revoke()


def _cycle(
    child: subprocess.Popen[bytes],
    digest: str,
    level: Level,
    gpu: Gpu,
    nvml: Nvml,
    checkpoint: Checkpoint,
) -> Verdict:
    if checkpoint.unavailable:
        return Verdict(suspendable=False, reason=checkpoint.unavailable, level=level)
    held = nvml.processes(gpu.uuid).get(child.pid, CANARY_BYTES)
    try:
        checkpoint.lock(child.pid, CALL_TIMEOUT_S)
        began = time.monotonic()
        checkpoint.checkpoint(child.pid, CALL_TIMEOUT_S)
        parked = time.monotonic()
        if nvml.processes(gpu.uuid).get(child.pid, 0):
            raise _Failed("the driver still shows its memory after the checkpoint")
        halfway = time.monotonic()
        checkpoint.restore(child.pid, CALL_TIMEOUT_S)
        restored = time.monotonic()
        checkpoint.unlock(child.pid)
        assert child.stdin is not None
        child.stdin.write(b"check\n")
        child.stdin.flush()
        if _answer(child, CALL_TIMEOUT_S, "", 1) != [digest]:
            raise _Failed("its memory came back changed")
    except (DeviceError, OSError, _Failed) as error:
        log.warning("device=%s self-test failed: %s", gpu.uuid, error)
        return Verdict(suspendable=False, reason=f"self-test failed: {error}", level=level)
    return Verdict(
        suspendable=True,
        level=level,
        suspend_bytes_per_s=int(held / max(parked - began, 1e-6)),
        resume_bytes_per_s=int(held / max(restored - halfway, 1e-6)),
    )


def _start(gpu: Gpu, files: LeaseDirectory) -> subprocess.Popen[bytes]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "LD_LIBRARY_PATH") or name.startswith("GPUSHARE_SIM")
    }
    environment |= {
        "CUDA_VISIBLE_DEVICES": gpu.uuid,
        "GPUSHARE_LEASE": files.path.name,
        "GPUSHARE_LEASE_DIR": str(files.path),
        "PYTHONPATH": str(PACKAGE_ROOT),
    }
    with contextlib.suppress(GpuShareError):  # not built: the limit is not enforced, and the test says so
        environment["LD_PRELOAD"] = str(native.preload_path())
    module = ["-m", "jupyter_gpushare.gpu.checkpoint", str(CANARY_BYTES), str(CANARY_BYTES)]
    return subprocess.Popen(
        [sys.executable, "-s", "-P", *module],
        env=environment,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _answer(child: subprocess.Popen[bytes], timeout_s: float, first: str, words: int) -> list[str]:
    """The words of the child's next line."""
    assert child.stdout is not None
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise _Failed(f"the child did not answer within {timeout_s:g} s")
        more = os.read(child.stdout.fileno(), 4096)
        if not more:
            raise _Failed(f"the child ended with {child.wait(timeout=CALL_TIMEOUT_S)}")
        line += more
    found = line.decode(errors="replace").split()
    if len(found) != words or (first and found[0] != first):
        raise _Failed(f"the child said {line[:80]!r}")
    return found
