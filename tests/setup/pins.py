"""Print the pinned versions of the development tools, which `make pins` writes to constraints.txt.

Tools are the packages of the extras ``test`` and ``docs`` that no site installs.  The versions are those
of the current environment.  Packages that sites install keep their ranges (pyproject.toml).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "jupyter-gpushare"
OF_SITES = {"", "demo", "docker", "kube", "lab", "node", "postgres", "systemd"}
OF_DEVELOPERS = {"docs", "test"}
HEAD = "# Made by `make pins`: versions of the tools for tests, checks, documentation and builds here.\n"


def required(name: str, extras: set[str]) -> set[tuple[str, frozenset[str]]]:
    """Return the requirements of a distribution with these extras: names, each with its own extras."""
    found = set()
    for line in distribution(name).requires or ():
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras):
            found.add((canonicalize_name(one.name), frozenset(one.extras)))
    return found


def closure(extras: set[str]) -> set[str]:
    """Return the names of all installed packages that this package needs with these extras."""
    known: set[tuple[str, frozenset[str]]] = set()
    left = [(PACKAGE, frozenset(extras))]
    while left:
        name, wanted = left.pop()
        if (name, wanted) in known:
            continue
        known.add((name, wanted))
        try:
            left += required(name, {"", *wanted})
        except PackageNotFoundError:  # a package of another platform
            known.discard((name, wanted))
    return {name for name, _ in known}


def pins() -> str:
    """Return the lines of constraints.txt."""
    tools = closure(OF_DEVELOPERS) - closure(OF_SITES)
    return HEAD + "".join(f"{name}=={version(name)}\n" for name in sorted(tools))


if __name__ == "__main__":
    print(pins(), end="")
