"""Reasons why nothing can be suspended reach the page by key."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from jupyter_gpushare.gpu.checks.canary import BLIND
from jupyter_gpushare.gpu.leases import blockers
from jupyter_gpushare.gpu.leases.files import TAINT_WORDS, Taint, words_of
from jupyter_gpushare.messages import english, reason_text

FIXED = [
    node.value.value
    for node in ast.walk(ast.parse(Path(blockers.__file__).read_text()))
    if isinstance(node, ast.Return)
    if isinstance(node.value, ast.Constant)
    if node.value.value
]


@pytest.mark.parametrize(
    "reason",
    [
        *FIXED,
        *(f"it uses {word}" for word in TAINT_WORDS.values()),
        f"it uses {words_of([Taint.MANAGED, Taint.IPC, Taint.PEER])}",
        BLIND,
        "the device is out of service: the driver lost it",
        "the device is out of service: preload library not loaded",
        "3 processes ended while the driver suspended or resumed them on this device; "
        "stop and start the device helper to try again",
    ],
)
def test_a_known_reason_has_a_key_and_its_own_english(reason):
    found = reason_text(reason)
    assert found.key != "verbatim"
    assert "verbatim" not in [
        arg.key for arg in found.args if found.key == "reason.uses" if not isinstance(arg, str)
    ]
    assert english(found) == reason


@pytest.mark.parametrize(
    "reason", ["", "cuCheckpoint: error 999", "it uses a thing that nobody knew", "a, b: %1"]
)
def test_any_other_reason_stays_as_it_is(reason):
    assert english(reason_text(reason)) == reason


def test_the_fixed_reasons_are_found():
    assert len(FIXED) >= 2
