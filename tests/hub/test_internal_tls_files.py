"""The three files of the Hub's internal TLS: which variables name them, and what is said of wrong ones."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from certipy import Certipy

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.internal_tls import VARIABLES, internal_tls


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    store = Certipy(store_dir=str(tmp_path))
    store.create_ca("ca")
    files = store.create_signed_pair("both", "ca")["files"]
    return dict(zip(VARIABLES, (files["key"], files["cert"], files["ca"]), strict=True))


def test_a_site_without_it_has_no_context() -> None:
    assert internal_tls({}) is None
    assert internal_tls(dict.fromkeys(VARIABLES, "")) is None


@pytest.mark.parametrize("purpose", [ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH])
def test_both_sides_demand_a_certificate_of_the_hubs_authorities(
    env: dict[str, str], purpose: ssl.Purpose
) -> None:
    context = internal_tls(env, purpose)
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert [each["subject"] for each in context.get_ca_certs()] == [((("commonName", "ca"),),)]


def test_what_is_missing_is_named(env: dict[str, str]) -> None:
    del env["JUPYTERHUB_SSL_CLIENT_CA"]
    with pytest.raises(GpuShareError, match="JUPYTERHUB_SSL_CLIENT_CA"):
        internal_tls(env)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_file_that_cannot_be_read_is_named(env: dict[str, str], variable: str) -> None:
    Path(env[variable]).unlink()
    with pytest.raises(GpuShareError, match=f"{env[variable]}: No such file"):
        internal_tls(env)


def test_a_key_of_another_certificate_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    other = Certipy(store_dir=str(tmp_path)).create_signed_pair("other", "ca")["files"]
    with pytest.raises(GpuShareError, match="cannot be used"):
        internal_tls(env | {"JUPYTERHUB_SSL_KEYFILE": other["key"]})
