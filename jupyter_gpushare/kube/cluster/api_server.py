"""Address and credentials of the API server: from a pod's service account, a token or a kubeconfig file."""

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
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOGIN_TIMEOUT_S = 10.0


class KubeError(GpuShareError):
    """The API server refused a request (HTTP ``status``), or gave no usable answer (``status`` 0)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """Address and credentials of an API server."""

    url: str = ""
    token: str = ""
    token_file: Path | None = None  # read before each request, because the kubelet renews it
    ca_file: Path | None = None  # None: the system's certificate authorities
    kubeconfig: Path | None = None  # replaces all other fields; needs a current context

    @classmethod
    def of_pod(cls, environ: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> ApiServer:
        """Return the API server of the cluster that this process runs in.

        Raises:
            KubeError: this process is not in a pod with a service account.
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
        """Return the configuration for the client library, with a token that is valid now.

        Raises:
            KubeError: a file cannot be used, or the token would be sent to a server that is not verified.
        """
        config = Configuration(host=self.url)
        if self.kubeconfig is not None:
            try:
                self.kubeconfig.stat()  # its error for a missing file is clearer than the library's
                async with asyncio.timeout(_LOGIN_TIMEOUT_S):  # the file may name a login program
                    await load_kube_config(str(self.kubeconfig), client_configuration=config)
            except Exception as error:  # a malformed file can cause any exception
                # The rest may quote an entry of the file, with its token.
                reason = str(error).partition("{")[0] or type(error).__name__
                raise KubeError(f"{self.kubeconfig} cannot be used as a kubeconfig file: {reason}") from None
        else:
            config.ssl_ca_cert = str(self.ca_file) if self.ca_file else None
            if self.token:
                config.api_key["BearerToken"] = f"Bearer {self.token}"
            if self.token_file is not None:
                config.refresh_api_key_hook = self._read_token
                self._read_token(config)
        parts = urlsplit(config.host)
        if not config.verify_ssl:
            raise KubeError(f"insecure-skip-tls-verify of {config.host}: name the certificate-authority")
        if config.api_key and parts.scheme != "https" and parts.hostname not in _LOOPBACK:
            raise KubeError(f"{config.host}: a token is sent over https:// only")
        return config

    def _read_token(self, config: Configuration) -> None:
        assert self.token_file is not None
        try:
            config.api_key["BearerToken"] = f"Bearer {self.token_file.read_text(encoding='utf-8').strip()}"
        except OSError as error:
            raise KubeError(f"the token of the service account cannot be read: {error.strerror}") from None
