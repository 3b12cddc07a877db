"""Checks of ``gpushare doctor`` about rights: the token, the user's projects and what they are guaranteed."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.cli.checks import Check, fail, ok, warn
from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.errors import RequestError
from jupyter_gpushare.protocol import wire

_SETTING = "GPUSHARE_API_TOKEN (or give --token)"


def no_token(environment: Mapping[str, str]) -> Check:
    """Say where a token comes from, where none is known."""
    advice = "make one on the Hub's token page, with the scope access:services!service=gpushare, and set "
    if "JUPYTERHUB_USER" in environment:
        advice = "restart this server: the Hub gives it a token; else "
    return fail("No token is known here, so nothing but health can be asked.", advice + _SETTING)


def check_refusal(error: RequestError) -> Check:
    """What to do about a token that the broker or the Hub refused."""
    advice = (
        "use a token with the scope access:services!service=gpushare; the administrator gives users that "
    )
    advice += "scope by c.JupyterHub.extra_user_scopes (docs/admin.md, 3)"
    if error.reason == "login":  # the Hub does not know it
        advice = "it has expired or was revoked: restart this server, or make a new one on the Hub's token "
        advice += f"page and set {_SETTING}"
    return fail(f"{str(error).rstrip('.')}.", advice)


def check_projects(status: wire.Status, devices: wire.Devices) -> Check:
    """Whether the user may use GPUs, and whether the machine has what projects are guaranteed."""
    if not status.projects:
        said = f"{status.user} belongs to no project that may use GPUs."
        advice = "the administrator adds the user to a Hub group of a project in c.GPUShareBroker.projects"
        return fail(said, advice)
    names = ", ".join(project.name for project in status.projects)
    guaranteed = devices.guaranteed_milli / WHOLE_GPU
    if devices.devices and guaranteed > len(devices.devices):
        said = (
            f"Projects are guaranteed {guaranteed:g} GPUs together; this machine has {len(devices.devices)}."
        )
        advice = "the administrator lowers the quotas (`gpushare admin quota`, c.GPUShareBroker.projects)"
        return warn(said, advice)
    return ok(f"You may use the GPUs of {names}.")
