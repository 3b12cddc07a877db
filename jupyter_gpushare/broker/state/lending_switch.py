"""The lending mode in force: as configured, unless an administrator has set another one."""

from __future__ import annotations

from dataclasses import dataclass, field

from jupyter_gpushare.broker.state.records import LendingMode, LendingOverride


@dataclass(slots=True)
class LendingSwitch:
    """Configured mode and override; the override is stored and outlives restarts."""

    configured: LendingMode
    override: LendingOverride = field(default_factory=LendingOverride)

    @property
    def mode(self) -> LendingMode:
        """The mode in force."""
        return self.configured if self.override.mode is None else self.override.mode

    @property
    def obstacle(self) -> str:
        """Why no session is suspended, as a part of a sentence; empty: lending is on."""
        match self.mode:
            case LendingMode.ON:
                return ""
            case LendingMode.WATCH:
                return "lending is only watched on this machine"
            case LendingMode.OFF:
                return "lending is switched off on this machine"
