"""Render the chart: read a list of values (JSON) from standard input, print objects or an error for each.

It is a separate program, because the Go library of Helm has its own signal handlers and threads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart, HelmError

CHART = Path(__file__).resolve().parents[2] / "helm-values" / "gpushare"


def main() -> None:
    answers: list[dict[str, Any]] = []
    with Chart.load(CHART) as chart:
        for values in json.load(sys.stdin):
            try:
                made = chart.render(values, name="gpushare", namespace="gpushare")
            except HelmError as error:
                answers.append({"error": str(error)})
                continue
            texts = [text for name, text in made.items() if name.endswith(".yaml")]
            objects = [found for text in texts for found in yaml.safe_load_all(text) if found]
            answers.append({"objects": objects})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
