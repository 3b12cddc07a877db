"""Lines and values: what goes in comes out, and nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpushare.gpu.leases import registry
from jupyter_gpushare.gpu.service import sampler
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper import build, decode, encode


def test_the_largest_sample_is_one_line() -> None:
    """Of as many leases and processes as are shown, with names that JSON writes in six bytes a letter."""
    each = sampler.PROCESSES_SHOWN_IN_ALL // registry.MAX_LEASES
    process = helper.ProcessSample(
        pid=4_194_304, started_at=1234567.123456, name="\x01" * 15, used_bytes=1 << 40, calls=1 << 60,
        kernel="0" * 36,
    )  # fmt: skip
    lease = helper.LeaseSample(
        lease="j" * 13, phase=helper.Phase.SUSPENDED, measured_at=1234567.123456, used_bytes={}, alive=True,
        active_at=1234567.123456,
        saved_bytes={f"GPU-{'0' * 36}": 1 << 40}, calls="c" * 60, suspendable=False,
        suspend_reason="r" * 300, processes=(process,) * each,
    )  # fmt: skip
    sample = helper.Sample(
        at=1.0, devices=(), leases=(lease,) * registry.MAX_LEASES, host_available_bytes=0, host_saved_bytes=0
    )
    assert len(encode(sample)) < 0.9 * helper.MAX_LINE_BYTES


@pytest.mark.parametrize(
    "value",
    [
        helper.SetLimit(lease="ada", uid=1, limits={"GPU-1": 5}, suspended=True),
        helper.Suspend(lease="ada", calls="c1", timeout_s=3.0),
        helper.MoveResult(done=False, refused=helper.Refusal.NO_MEMORY, reason="full"),
        helper.Event(seq=1, at=2.5, kind=helper.EventKind.WANTED, lease="ada", fields={"a": "b"}),
        helper.Sample(
            at=1.0,
            devices=(helper.DeviceSample(uuid="GPU-1", used_bytes=1, utilization_percent=2, healthy=True),),
            leases=(
                helper.LeaseSample(
                    lease="ada", phase=helper.Phase.SUSPENDED, measured_at=0.5, used_bytes={},
                    saved_bytes={"GPU-1": 4},
                    calls="c", active_at=1.5, suspendable=True, suspend_reason="", alive=True,
                    processes=(
                        helper.ProcessSample(pid=1, started_at=0.5, name="python", used_bytes=0, calls=-1),
                    ),
                ),
            ),
            host_available_bytes=7,
            host_saved_bytes=4,
        ),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_survives_a_line(value: Any) -> None:
    line = encode(value)
    assert line.count(b"\n") == 1
    assert build(type(value), decode(line)) == value


def test_a_whole_number_is_a_duration_too() -> None:
    assert build(helper.Resume, {"lease": "ada", "timeout_s": 5}).timeout_s == 5.0


def test_a_number_that_json_cannot_say_is_never_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode({"at": float("nan")})
