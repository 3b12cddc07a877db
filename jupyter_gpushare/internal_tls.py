"""JupyterHub's internal TLS (`c.JupyterHub.internal_ssl`): both sides present a certificate of the Hub.

The Hub gives the paths of three files to its servers and to the services that it starts; the unit of an
external service sets the same variables (docs/operations.md).
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from jupyter_gpushare.errors import GpuShareError

# jupyterhub/spawner.py, get_env
KEY, CERTIFICATE, AUTHORITIES = VARIABLES = (
    "JUPYTERHUB_SSL_KEYFILE",
    "JUPYTERHUB_SSL_CERTFILE",
    "JUPYTERHUB_SSL_CLIENT_CA",
)


def internal_tls(
    env: Mapping[str, str], purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH
) -> ssl.SSLContext | None:
    """Return the context for connections to Hub, proxy and servers; None if the site has no internal TLS.

    ``purpose`` is that of the peer's certificate: SERVER_AUTH to connect, CLIENT_AUTH to listen.  Only the
    Hub's authorities are trusted, not those of the system.

    Raises:
        GpuShareError: some of the variables are missing, or a file cannot be used.
    """
    if not any(env.get(name) for name in VARIABLES):
        return None
    if missing := [name for name in VARIABLES if not env.get(name)]:
        raise GpuShareError(f"the Hub's internal TLS needs {', '.join(missing)} too")
    try:
        return mutual_tls(env[CERTIFICATE], env[KEY], env[AUTHORITIES], purpose)
    except GpuShareError as error:
        raise GpuShareError(f"the Hub's internal TLS cannot be used: {error}") from None


def mutual_tls(certificate: str, key: str, authorities: str, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Return a context in which both sides must present a certificate of these authorities.

    Raises:
        GpuShareError: a file cannot be used.
    """
    try:
        for path in (key, certificate, authorities):
            with Path(path).open("rb"):
                pass  # errors of the ssl module would not name the file
        where = authorities
        context = ssl.create_default_context(purpose, cafile=authorities)
        where = f"{certificate} with {key}"
        context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError among them
        raise GpuShareError(f"{error.filename or where}: {error.strerror}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    return context
