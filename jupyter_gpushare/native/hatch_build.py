"""Hatchling's build hook: compile the C libraries and tag the wheel for its platform.

The libraries belong to one machine architecture but to no Python version, so the
wheel is ``py3-none-<platform>``.  Runs for editable installs too.
"""

from __future__ import annotations

import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface[Any]):
    """Called by hatchling before it collects a wheel's files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing or old, and tag the wheel.

        Raises:
            GpuShareError: the compiler is missing or refused.
        """
        if self.target_name != "wheel":
            return
        sys.path.insert(0, self.root)
        try:
            from jupyter_gpushare.native import build
        finally:
            sys.path.remove(self.root)
        build.build()
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"


def platform_tag() -> str:
    """The machine this wheel fits, as wheels spell it: ``linux_x86_64``."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
