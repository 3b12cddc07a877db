"""The lease's two files mean the same to C, to the device helper and to the tests."""

from __future__ import annotations

import json
from pathlib import Path

from jupyter_gpushare.gpu.leases import files
from jupyter_gpushare.native import build
from tests import simulator
from tests.native.programs import compiled, run

_FIELDS = {
    "gpushare_limit_page": ["magic", "version", "device_count", "mig", "ahead_us", "phase", "turn", "device"],
    "gpushare_limit_device": ["uuid", "limit_bytes", "context_bytes", "name", "kept_bytes"],
    "gpushare_account": ["magic", "version", "denied", "lock", "slot"],
    "gpushare_slot": [
        "pid",
        "taints",
        "start_ticks",
        "work",
        "calls",
        "queries",
        "again",
        "wants_memory",
        "settled",
        "waiting",
        "looking",
        "used_bytes",
    ],
}
_NUMBERS = [
    "GPUSHARE_LIMIT_MAGIC",
    "GPUSHARE_ACCOUNT_MAGIC",
    "GPUSHARE_VERSION",
    "GPUSHARE_DEVICES",
    "GPUSHARE_SLOTS",
    "GPUSHARE_RUNNING",
    "GPUSHARE_SUSPENDING",
    "GPUSHARE_SUSPENDED",
    "GPUSHARE_PAUSED",
    "GPUSHARE_REVOKED",
    "GPUSHARE_TAINT_MANAGED",
    "GPUSHARE_TAINT_IPC",
    "GPUSHARE_TAINT_EXPORTED",
    "GPUSHARE_TAINT_PEER",
    "GPUSHARE_TAINT_TRACED",
    "GPUSHARE_TAINT_FABRIC",
]


def as_compiled(folder: Path) -> dict[str, int]:
    """Sizes, offsets and numbers, as the compiler sees them."""
    values = {name: name for name in _NUMBERS}
    for struct, fields in _FIELDS.items():
        values[struct] = f"sizeof(struct {struct})"
        values |= {f"{struct}.{field}": f"offsetof(struct {struct}, {field})" for field in fields}
    lines = "\n".join(f'printf("\\"{key}\\": %zu,", (size_t)({value}));' for key, value in values.items())
    source = folder / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <gpushare_lease.h>\n"
        f'int main(void) {{ printf("{{"); {lines} printf("\\"end\\": 0}}"); return 0; }}\n'
    )
    program = compiled(folder / "layout", f"-I{build.NATIVE}", source)
    answer: dict[str, int] = json.loads(run(program).stdout)
    return answer


def test_c_and_python_agree_on_every_offset(tmp_path: Path) -> None:
    c = as_compiled(tmp_path)
    assert c["gpushare_limit_page"] == files.LIMIT_BYTES == simulator.PAGE_BYTES
    assert c["gpushare_limit_page.device"] == files.LIMIT_HEAD.size == simulator.PAGE_HEADER.size
    assert c["gpushare_limit_page.device_count"] == files.COUNT_AT == 8
    assert c["gpushare_limit_page.phase"] == files.PHASE_AT == 16
    assert c["gpushare_limit_page.turn"] == files.TURN_AT == files.PHASE_AT + 4
    assert c["gpushare_limit_page.ahead_us"] == files.AHEAD_AT
    assert c["gpushare_limit_device"] == files.LIMIT_DEVICE.size == simulator.PAGE_DEVICE.size
    assert c["gpushare_limit_device.limit_bytes"] == files.LIMIT_IN_DEVICE
    assert c["gpushare_limit_device.context_bytes"] == files.CONTEXT_IN_DEVICE
    assert c["gpushare_limit_device.name"] == files.NAME_IN_DEVICE
    assert c["gpushare_limit_device.kept_bytes"] == files.KEPT_IN_DEVICE
    assert c["gpushare_account"] == files.ACCOUNT_BYTES == simulator.ACCOUNT_BYTES
    assert c["gpushare_account.slot"] == files.ACCOUNT_HEAD.size == simulator.ACCOUNT_HEADER.size
    assert c["gpushare_account.denied"] == 8
    assert c["gpushare_slot"] == files.SLOT.size == simulator.SLOT.size
    assert c["gpushare_slot.used_bytes"] == files.USED_IN_SLOT
    fields = _FIELDS["gpushare_slot"][:-1]
    assert [c[f"gpushare_slot.{field}"] for field in fields] == [0, 4, 8, 16, 24, 32, 40, 48, 56, 64, 68]


def test_c_and_python_agree_on_every_number(tmp_path: Path) -> None:
    c = as_compiled(tmp_path)
    assert c["GPUSHARE_LIMIT_MAGIC"] == files.LIMIT_MAGIC == simulator.PAGE_MAGIC
    assert c["GPUSHARE_ACCOUNT_MAGIC"] == files.ACCOUNT_MAGIC
    assert c["GPUSHARE_VERSION"] == files.VERSION == simulator.VERSION
    assert c["GPUSHARE_DEVICES"] == files.DEVICES == simulator.DEVICES
    assert c["GPUSHARE_SLOTS"] == files.SLOTS == simulator.SLOTS
    for phase in simulator.Phase:
        assert c[f"GPUSHARE_{phase.name}"] == int(phase) == int(files.PagePhase[phase.name])
    for taint in files.Taint:
        assert c[f"GPUSHARE_TAINT_{taint.name}"] == int(taint)
