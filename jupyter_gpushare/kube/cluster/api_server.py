"""Where the API server is, and how to authenticate: a pod's service account, a token or a kubeconfig file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.kube.cluster.library import Configuration, load_kube_config

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HERE = ("127.0.0.1", "::1", "localhost")
_LOGIN_S = 10.0


class KubeError(GpuShareError):
    """The API server refused (``status``), or does not answer (``status`` 0)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """An API server, and how to authenticate to it."""

    url: str = ""
    token: str = ""
    token_file: Path | None = None  # read before each request: the kubelet renews it
    ca_file: Path | None = None  # None: the certificate authorities of the system
    kubeconfig: Path | None = None  # instead of all of these: a file with a current context

    @classmethod
    def of_pod(cls, environ: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> ApiServer:
        """Return the API server of the cluster that this process runs in.

        Raises:
            KubeError: this process does not run in a pod with a service account.
        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port or not (account / "token").exists():
            raise KubeError(
                "this is no pod with a service account: set c.GPUShareKube.kubeconfig, or "
                "c.GPUShareKube.api_server with token_file and ca_file"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(url=f"https://{host}:{port}", token_file=account / "token", ca_file=account / "ca.crt")

    async def configuration(self) -> Configuration:
        """Return this as a configuration of the client library, with a token that is valid now.

        Raises:
            KubeError: a file cannot be used, or the token would be sent to a server that is not verified.
        """
        found = Configuration(host=self.url)
        if self.kubeconfig is not None:
            try:
                self.kubeconfig.stat()  # of one that is missing the library says less
                async with asyncio.timeout(_LOGIN_S):  # it may name a program that logs in
                    await load_kube_config(str(self.kubeconfig), client_configuration=found)
            except Exception as error:  # whatever a malformed file leads to
                # An entry of the file may follow, with its token.
                said = str(error).partition("{")[0] or type(error).__name__
                raise KubeError(f"{self.kubeconfig} cannot be used as a kubeconfig file: {said}") from None
        else:
            found.ssl_ca_cert = str(self.ca_file) if self.ca_file else None
            if self.token:
                found.api_key["BearerToken"] = f"Bearer {self.token}"
            if self.token_file is not None:
                found.refresh_api_key_hook = self._read_token
                self._read_token(found)
        parts = urlsplit(found.host)
        if not found.verify_ssl:
            raise KubeError(f"insecure-skip-tls-verify of {found.host}: name the certificate-authority")
        if found.api_key and parts.scheme != "https" and parts.hostname not in _HERE:
            raise KubeError(f"{found.host}: a token is sent over https:// only")
        return found

    def _read_token(self, into: Configuration) -> None:
        assert self.token_file is not None
        try:
            into.api_key["BearerToken"] = f"Bearer {self.token_file.read_text(encoding='utf-8').strip()}"
        except OSError as error:
            raise KubeError(f"the token of the service account cannot be read: {error.strerror}") from None
