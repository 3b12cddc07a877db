"""Run scenarios one after the other, each bounded, and keep what was seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.gpu.machine import GIB, MIB
from tests.gpu_real.one import SKIPPED
from tests.gpu_real.order import Scenario
from tests.gpu_real.site import ROOT, Helper, end

# How long the helper may take over a word between two scenarios.
CLEAR_S = 20.0
# By how much later a scenario is ended that did not end itself.
LATER_S = 10.0


@dataclass
class Result:
    """What became of one scenario: ``passed``, ``failed`` or ``skipped``, and why."""

    scenario: str
    outcome: str
    reason: str = ""
    took_s: float = 0.0
    rows: list[list[str]] = field(default_factory=list)


class Bench:
    """A helper, the scenarios that ran on it, and their table."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *,
        out: Path | None,
        budget_s: float,
        why_not: str = "",
    ) -> None:
        """``out``: a folder for gpu.json, gpu.md and the helper's log; ``budget_s`` bounds all together.

        ``why_not`` says why nothing can run here, or is empty.
        """
        self._folder = folder
        self._environment = dict(environment)
        self._out = out
        self._until = time.monotonic() + budget_s
        self.simulated = "GPUSHARE_SIM_STATE" in environment
        self._scale_bytes = 4 * MIB if self.simulated else GIB
        self._sample_s = 0.2 if self.simulated else 0.5
        self.results: list[Result] = []
        self.helper: Helper | None = None
        self.title = why_not
        self._failures = 0
        self._given_up = why_not

    def run(self, scenario: Scenario) -> Result:
        """Run one scenario in a process of its own; never raises for what happens in it."""
        began = time.monotonic()
        result = self._run(scenario, min(scenario.limit_s, self._until - began))
        result.took_s = round(time.monotonic() - began, 2)
        print(f"{result.outcome} in {result.took_s:.1f} s: {scenario.name} {result.reason}", flush=True)
        self.results.append(result)
        self._keep()
        return result

    def _run(self, scenario: Scenario, limit_s: float) -> Result:
        result = Result(scenario.name, "skipped")
        if self._given_up:
            result.reason = self._given_up
            return result
        if limit_s < 1:
            result.reason = "no time is left"
            return result
        if self.simulated and not scenario.everywhere:
            result.reason = "frameworks do not run on the simulated driver"
            return result
        try:
            helper = self._ready()
            reason = helper.ill()
        except (AssertionError, OSError) as error:
            self._end_helper()
            result.outcome, result.reason = "failed", f"the device helper does not answer: {error}"
            # Once it may be the scenario before; twice, it would cost all the time there is.
            self._failures += 1
            self._given_up = "the device helper does not start" if self._failures > 1 else ""
            return result
        if reason:
            result.reason = f"the device is out of service: {reason}"
            return result
        said = self._folder / f"{scenario.name}.jsonl"
        said.touch()
        command = [
            sys.executable, "-m", "tests.gpu_real.one", scenario.name,
            "--folder", str(self._folder), "--said", str(said),
            "--scale-bytes", str(self._scale_bytes), "--sample-s", str(self._sample_s),
            "--limit-s", str(limit_s),
        ]  # fmt: skip
        child = subprocess.Popen(command, cwd=ROOT, env=self._environment, start_new_session=True)
        try:
            status = child.wait(limit_s + LATER_S)
            result.outcome = {0: "passed", SKIPPED: "skipped"}.get(status, "failed")
        except subprocess.TimeoutExpired:
            result.outcome, result.reason = "failed", f"not done after {limit_s:.0f} s"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                end(child)
        for line in said.read_text().splitlines():
            value = json.loads(line)
            if isinstance(value, str):
                result.reason = value
            else:
                result.rows.append(value)
        if result.outcome == "failed" and not result.reason:
            result.reason = f"it ended with status {child.returncode}"
        if not helper.clear(CLEAR_S):
            self._end_helper()
        return result

    def _ready(self) -> Helper:
        if self.helper is not None and self.helper.ended():
            self._end_helper()
        if self.helper is None:
            self.helper = Helper(self._folder, self._environment, self._sample_s)
            device = self.helper.device
            kind = "the simulated driver (proves the code, not the GPU)" if self.simulated else "driver"
            version = self.helper.inventory["driver"]
            self.title = f"{device['name']}, {kind} {version}, {time.strftime('%Y-%m-%d')}: `make test-gpu`"
        return self.helper

    def _end_helper(self) -> None:
        if self.helper is not None:
            self.helper.close()
            self.helper = None

    def table(self) -> str:
        """All rows so far, as a table of Markdown."""
        rows = [f"| {what} | {figure} |" for result in self.results for what, figure in result.rows]
        rows += [
            f"| {result.scenario} | {result.outcome}: {(result.reason.strip().splitlines() or [''])[-1]} |"
            for result in self.results
            if result.outcome != "passed"
        ]
        return "\n".join([self.title, "", "| what | measured |", "|---|---|", *rows, ""])

    def _keep(self) -> None:
        """Write down what is known so far: the machine may be gone with the next scenario."""
        folder = self._out or self._folder
        plain = {
            "title": self.title,
            "simulated": self.simulated,
            "inventory": self.helper.inventory if self.helper else None,
            "results": [asdict(result) for result in self.results],
        }
        (folder / "gpu.json").write_text(json.dumps(plain, indent=1))
        (folder / "gpu.md").write_text(self.table())
        log = self._folder / "helper.log"
        if self._out and log.exists():
            (folder / "helper.log").write_bytes(log.read_bytes())

    def close(self) -> None:
        """End the helper, with what is left on it, and print the whole table."""
        if self.helper is not None:
            self.helper.clear(CLEAR_S)
        self._end_helper()
        print("\n" + self.table(), flush=True)
