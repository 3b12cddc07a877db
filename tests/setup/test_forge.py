"""Configuration for a public forge is valid, and refers to what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from check_jsonschema import main
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (FORGE / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
CHECKED = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [FORGE / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.readthedocs": [ROOT / ".readthedocs.yaml"],
}


@pytest.mark.parametrize("schema", CHECKED)
def test_the_files_for_the_forge_follow_their_schema(schema):
    checked = CliRunner().invoke(main, ["--builtin-schema", schema, *map(str, CHECKED[schema])])
    assert checked.exit_code == 0, checked.output


def test_workflows_run_commands_of_this_repository():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in WORKFLOWS:
        jobs = yaml.safe_load(path.read_text())["jobs"].values()
        commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
        assert commands
        for command in commands:
            if command.startswith("make "):
                assert {word for word in command.split()[1:] if "=" not in word} <= targets
            if command.startswith(".ci/"):
                assert (ROOT / command).is_file()


def test_every_job_of_a_workflow_has_a_time_limit():
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            assert job["timeout-minutes"] <= 90, name
