"""Run one scenario in this process, with a running helper: ``python -m tests.gpu_real.one``.

Exit status: 0 passed, 1 failed (the reason is printed), 3 skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import traceback
from pathlib import Path

from tests.gpu_real.order import SCENARIOS
from tests.gpu_real.site import Report, Site, Skip

FAILED, SKIPPED = 1, 3


class TooLate(Exception):
    """The time of a scenario is over."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True, help="the helper's")
    parser.add_argument("--said", type=Path, required=True, help="where rows and reasons go")
    parser.add_argument("--scale-bytes", type=int, required=True)
    parser.add_argument("--sample-s", type=float, required=True)
    parser.add_argument("--limit-s", type=float, required=True, help="when it ends itself")
    given = parser.parse_args()
    scenario = next(each for each in SCENARIOS if each.name == given.name)
    site = Site(
        given.folder, os.environ, Report(given.said), scale_bytes=given.scale_bytes, sample_s=given.sample_s
    )

    def too_late(_number: int, _frame: object) -> None:
        raise TooLate(f"not done after {given.limit_s:.0f} s")

    # A process that hangs in the driver is ended from outside; any other wait is reported here.
    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, given.limit_s)
    reason, status = "", 0
    try:
        scenario.function(site, *scenario.given)
    except Skip as why:
        reason, status = str(why), SKIPPED
    except Exception:  # the outermost of this process
        reason, status = traceback.format_exc(), FAILED
    signal.setitimer(signal.ITIMER_REAL, 0)
    if reason:
        with given.said.open("a") as file:
            file.write(json.dumps(reason) + "\n")
    site.close()
    # This skips the driver's own exit code, which may wait for the driver.
    os._exit(status)


if __name__ == "__main__":
    main()
