"""Texts of refused starts, and the exception that makes the Hub show them to users."""

from __future__ import annotations

import html
import re

from traitlets import TraitError

from jupyter_gpushare.hub.compat import SpawnException


class SettingRefused(TraitError):
    """The Hub does not start with this setting of the site; the text says what to change."""


BROKER_DOWN = (
    "The GPU service does not answer, so no GPU can be given now. "
    'Try again in a minute, or choose "No GPU": such a server starts at once.'
)

NOT_SET_UP = (
    "The GPU service of this Hub is not set up correctly, so no GPU can be given. Tell the administrator; "
    'the Hub\'s log says what to change. You can choose "No GPU": such a server starts at once.'
)

BAD_GRANT = (
    "The GPU service answered with settings that this Hub does not accept, so the server was not started. "
    "Tell the administrator; the Hub's log names them."
)

JOB_NAME = (
    "This is the name of a training job, which only the GPU service starts. "
    "To run the job again, choose Retry in JupyterLab's list of jobs, or gpushare retry."
)

SHARED_RESOURCE = (
    "On this Hub a second server of yours would replace the one that runs, so it was not started. "
    "Tell the administrator; the Hub's log says what to set."
)

NO_LIMITS = (
    "The limits of memory and processes could not be set, so the server was not started. "
    "Tell the administrator; the Hub's log says why."
)

OWN_GPU = (
    "This choice of server asks the cluster for a GPU of its own, or does not run where yours is, so it was "
    "not started. Choose the size of your GPU on this page, with another profile. "
    "The Hub's log tells the administrator what to change."
)

NOT_PLACED = (
    "The machine of your GPU has no CPU or memory left for your server, so the start was given up. "
    "Start it again: another machine is tried then. A smaller profile may also help."
)

SITE_SETTING = (
    "This Hub's settings do not fit servers with GPUs, so the server was not started. "
    "Tell the administrator; the Hub's log says what to set."
)


def refusal(message: str, reason: str, status: int) -> SpawnException:
    """Return the exception for a refused start, with its text for every page of the Hub."""
    word = re.sub(r"[^a-z0-9_]", "_", reason.lower())[:60] or "refused"
    error = SpawnException(message, reason=word, status_code=status, message_html=html.escape(message))
    # The form page and the page after a failed start read these attributes.
    error.jupyterhub_message = message
    error.jupyterhub_html_message = html.escape(message)
    return error
