"""Run one scenario in a process of its own, against a helper that runs: ``python -m tests.gpu_real.one``.

Exit status: 0 shown, 1 not as it should be (the reason is printed), 3 skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from pathlib import Path

from tests.gpu_real.order import SCENARIOS
from tests.gpu_real.site import Report, Site, Skip

FAILED, SKIPPED = 1, 3


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--folder", type=Path, required=True, help="the helper's")
    parser.add_argument("--said", type=Path, required=True, help="where rows and reasons go")
    parser.add_argument("--scale-bytes", type=int, required=True)
    parser.add_argument("--sample-s", type=float, required=True)
    given = parser.parse_args()
    scenario = next(each for each in SCENARIOS if each.name == given.name)
    site = Site(
        given.folder, os.environ, Report(given.said), scale_bytes=given.scale_bytes, sample_s=given.sample_s
    )
    try:
        scenario.function(site, *scenario.given)
        return 0
    except Skip as why:
        reason, status = str(why), SKIPPED
    except Exception:  # the outermost of this process
        reason, status = traceback.format_exc(), FAILED
    finally:
        site.close()
    with given.said.open("a") as file:
        file.write(json.dumps(reason) + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
