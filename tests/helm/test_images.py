"""The images of helm-values/images can be installed, and go with the Hub of the chart that is pinned.

hub_image.txt has the versions of all packages in that Hub's image; CONTRIBUTING.md says how to renew it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helm.conftest import FOLDER, ROOT
from tests.helm.test_values import HUB_IMAGE, VERSIONS

# The Hub's Dockerfile lets pip renew this one.
RENEWED = "tornado"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = {path.stem: path.read_text() for path in (FOLDER / "images").iterdir()}


def wanted(image: str) -> list[Requirement]:
    """What pyproject.toml requires, with the extras with which an image installs the package."""
    (extras,) = re.findall(r"manylinux\*_\$\(uname -m\)\.whl\)?(?:\[([a-z,]+)\])?", IMAGES[image])
    lines = [*PROJECT["dependencies"]]
    for extra in filter(None, extras.split(",")):
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def refused(image: str, kept: dict[str, str]) -> list[str]:
    """Requirements of the package that the versions of an image do not meet."""
    found = [(one, kept.get(canonicalize_name(one.name))) for one in wanted(image)]
    return [
        f"{one}, and the image has {has}" for one, has in found if has and not one.specifier.contains(has)
    ]


def test_the_hubs_image_takes_the_package_and_keeps_its_versions() -> None:
    assert f"grep -v '^{RENEWED}==' > /tmp/kept.txt" in IMAGES["hub"]
    assert "-c /tmp/kept.txt" in IMAGES["hub"]
    assert refused("hub", {name: HUB_IMAGE[name] for name in HUB_IMAGE if name != RENEWED}) == []


def test_the_version_that_the_hubs_image_does_not_keep_is_one_that_it_cannot_keep() -> None:
    (found,) = refused("hub", HUB_IMAGE)
    assert found.startswith(RENEWED)


@pytest.mark.parametrize("image", ["gpushare", "lab"])
def test_the_other_images_have_the_hubs_version_of_jupyterhub(image: str) -> None:
    pins = dict(re.findall(r"\b([a-z][a-z-]*)==([\d.]+)", IMAGES[image]))
    assert pins == {"jupyterhub": HUB_IMAGE["jupyterhub"]}
    assert refused(image, pins) == []


def test_images_stand_on_the_pinned_versions_and_install_the_wheel_that_is_built() -> None:
    assert IMAGES.keys() == {"gpushare", "hub", "lab"}
    assert f"FROM quay.io/jupyterhub/k8s-hub:{VERSIONS['jupyterhub-chart']}\n" in IMAGES["hub"]
    assert 'ENTRYPOINT ["gpushare"]' in IMAGES["gpushare"]


@pytest.mark.long
def test_pip_finds_versions_of_all_that_the_hubs_image_needs(tmp_path: Path) -> None:
    """With an index of packages, and for the interpreter of that image (Python 3.12)."""
    kept = tmp_path / "kept.txt"
    kept.write_text("".join(f"{name}=={HUB_IMAGE[name]}\n" for name in HUB_IMAGE if name != RENEWED))
    platform = ["--python-version=3.12", "--only-binary=:all:", "--platform=manylinux2014_x86_64"]
    platform += ["--platform=manylinux_2_17_x86_64", "--platform=manylinux_2_28_x86_64"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--target", tmp_path / "nowhere"),
            *platform,
            *("-c", kept, *map(str, wanted("hub"))),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jupyterhub-kubespawner-7.0.0" in done.stdout
