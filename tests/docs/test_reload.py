"""docs/operations.md lists what a reload of the broker does not change."""

from __future__ import annotations

import re
from pathlib import Path

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_the_page_names_each_setting_that_a_reload_does_not_change():
    names = {
        name
        for name, trait in GPUShareBroker.class_traits(config=True).items()
        if trait.this_class in (GPUShareBroker, Settings)
    }
    read: set[str] = set()

    class Recording(GPUShareBroker):
        def __getattribute__(self, name: str) -> object:
            read.add(name)
            return super().__getattribute__(name)

    broker = Recording()
    read.clear()
    broker.policy()
    broker.receivers()
    assert {"projects", "idle_timeout", "lending"} < read
    section = PAGE.read_text().partition("## Change settings without a restart")[2].partition("\n## ")[0]
    (listed,) = re.findall(r"At a restart only: (.*?)\.", section)
    assert set(re.findall(r"`(\w+)`", listed)) == names - read
