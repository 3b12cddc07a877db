"""Which lines of a page's console fail a test of the extension."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.ui.pages import is_complaint

PLUGIN = "jupyter-gpushare:panel"


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        (f"Error activating plugin: {PLUGIN}", True),
        ("Unsatisfied version 2.0.0 from jupyter-gpushare of shared singleton module @lumino/widgets", True),
        ("TypeError: lease is null\n    at jupyter-gpushare/static/503.js", True),
        ("Error activating plugin: @jupyterlab/toc-extension:tracker", False),
    ],
)
def test_a_line_about_the_extension_fails_its_test(text, fails):
    assert is_complaint(text) is fails


def test_a_warning_about_a_slow_start_fails_no_test():
    slow = [
        f"Plugin {PLUGIN} is taking too long to activate.",
        f"Plugin {PLUGIN} (with 0 dependants) took 5312.90ms to activate.",
    ]
    assert not any(map(is_complaint, slow))
    # What JupyterLab says, if it still says it so.
    (core,) = Path(sys.prefix, "share", "jupyter", "lab", "static").glob("jlab_core.*.js")
    source = core.read_text()
    assert "`Plugin ${e} is taking too long to activate.`" in source
    assert "`Plugin ${e} (with ${t} dependants) took ${r.toFixed(2)}ms to activate.`" in source
