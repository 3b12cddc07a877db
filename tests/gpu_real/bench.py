"""Run scenarios one after the other, each with a time limit, and store the results."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
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

# The maximum seconds for an answer of the helper between two scenarios.
CLEAR_S = 20.0
# The extra seconds before a scenario is ended that did not end by itself.
LATER_S = 10.0
NO_TIME = "no time is left"
WARM = "import torch; torch.ones(1, device='cuda')"
WARM_S = 120.0


@dataclass
class Result:
    """The result of one scenario: ``passed``, ``failed`` or ``skipped``, and why."""

    scenario: str
    outcome: str
    reason: str = ""
    took_s: float = 0.0
    rows: list[list[str]] = field(default_factory=list)


def new_folder(out: Path, name: str) -> Path:
    """Create a folder in ``out``: ``name``, or ``name-2``, ... if earlier runs have it; return its path.

    Raises:
        OSError: the folder cannot be created.
    """
    out.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = out / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


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
        """Store results in ``out`` (`folder` if None); ``budget_s`` limits all scenarios together.

        The results are gpu.json, gpu.md, the helper's log and, as soon as they are measured, the rows of each
        scenario.  Every user should be able to reach ``folder``, because the self-test runs as another one.
        ``why_not`` says why nothing can run on this machine, or is empty.
        """
        self._folder = folder
        self._environment = dict(environment)
        self._out = out.resolve() if out else folder
        if out:
            (folder / "helper.log").symlink_to(self._out / "helper.log")
        self._rows = self._out / "rows"
        self._rows.mkdir(exist_ok=True)
        self._until = time.monotonic() + budget_s
        self.simulated = "GPUSHARE_SIM_STATE" in environment
        self._scale_bytes = 4 * MIB if self.simulated else GIB
        self._sample_s = 0.2 if self.simulated else 0.5
        self.results: list[Result] = []
        self.helper: Helper | None = None
        self.title = why_not
        self._failures = 0
        self._is_warm = False
        self._given_up = why_not

    def run(self, scenario: Scenario) -> Result:
        """Run one scenario in a separate process; errors in it never raise."""
        began = time.monotonic()
        result = self._run(scenario)
        result.took_s = round(time.monotonic() - began, 2)
        print(f"{result.outcome} in {result.took_s:.1f} s: {scenario.name} {result.reason}", flush=True)
        self.results.append(result)
        self._keep()
        return result

    def _run(self, scenario: Scenario) -> Result:
        result = Result(scenario.name, "skipped")
        if self._given_up or self._left_s() < 1:
            result.reason = self._given_up or NO_TIME
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
            # One failure may come from the scenario before; a second would cost all the remaining time.
            self._failures += 1
            self._given_up = "the device helper does not start" if self._failures > 1 else ""
            return result
        if reason:
            result.reason = f"the device is out of service: {reason}"
            return result
        limit_s = min(scenario.limit_s, self._left_s())
        if limit_s < 1:
            result.reason = NO_TIME
            return result
        said = self._rows / f"{scenario.name}.jsonl"
        said.write_text("")
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
            self._warm_torch()
            self.helper = Helper(self._folder, self._environment, self._sample_s)
            device = self.helper.device
            kind = "the simulated driver (proves the code, not the GPU)" if self.simulated else "driver"
            version = self.helper.inventory["driver"]
            self.title = f"{device['name']}, {kind} {version}, {time.strftime('%Y-%m-%d')}: `make test-gpu`"
        return self.helper

    def _left_s(self) -> float:
        return self._until - time.monotonic()

    def _warm_torch(self) -> None:
        """Read PyTorch from the disk once, which can take longer than a scenario may."""
        if self._is_warm or self.simulated or importlib.util.find_spec("torch") is None:
            return
        self._is_warm = True
        began = time.monotonic()
        result = Result("torch_is_warmed", "failed")
        try:
            done = subprocess.run(
                [sys.executable, "-c", WARM], env=self._environment, capture_output=True, text=True,
                timeout=min(WARM_S, max(1.0, self._left_s())),
            )  # fmt: skip
            result.outcome = "failed" if done.returncode else "passed"
            result.reason = done.stderr[-300:] if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            result.reason = f"not imported after {error.timeout:.0f} s"
        result.took_s = round(time.monotonic() - began, 2)
        result.rows = [["the first import of torch, with a context", f"{result.took_s:.1f} s"]]
        self.results.append(result)

    def _end_helper(self) -> None:
        if self.helper is not None:
            self.helper.close()
            self.helper = None

    def table(self) -> str:
        """Return all current rows as a Markdown table."""
        rows = [f"| {what} | {figure} |" for result in self.results for what, figure in result.rows]
        rows += [
            f"| {result.scenario} | {result.outcome}: {(result.reason.strip().splitlines() or [''])[-1]} |"
            for result in self.results
            if result.outcome != "passed"
        ]
        return "\n".join([self.title, "", "| what | measured |", "|---|---|", *rows, ""])

    def _keep(self) -> None:
        """Write the current results: the machine may be lost in the next scenario."""
        plain = {
            "title": self.title,
            "simulated": self.simulated,
            "inventory": self.helper.inventory if self.helper else None,
            "results": [asdict(result) for result in self.results],
        }
        for name, text in (("gpu.json", json.dumps(plain, indent=1)), ("gpu.md", self.table())):
            new = self._out / f"{name}.new"
            with new.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._out / name)

    def close(self) -> None:
        """End the helper and its remaining processes, and print the whole table."""
        if self.helper is not None:
            self.helper.clear(CLEAR_S)
        self._end_helper()
        print("\n" + self.table(), flush=True)
