"""A kubeconfig file for tests."""

from __future__ import annotations

from pathlib import Path

import yaml


def write_kubeconfig(folder: Path, url: str, token: str = "t", ca: Path | None = None) -> Path:
    """Write a kubeconfig file with one context and return it."""
    named = {"name": "c"}
    cluster = {"server": url} | ({"certificate-authority": str(ca)} if ca else {})
    config = {
        "current-context": "c",
        "contexts": [named | {"context": {"cluster": "c", "user": "c"}}],
        "clusters": [named | {"cluster": cluster}],
        "users": [named | {"user": {"token": token}}],
    }
    file = folder / f"kubeconfig-{token}"
    file.write_text(yaml.safe_dump(config))
    return file
