"""Address and credentials of the API server: from a pod's service account, a token or a kubeconfig file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.kube.cluster.library import Configuration, KubeConfigLoader, KubeConfigMerger

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        """Return the configuration for the client library.

        The certificates and keys in a kubeconfig file become files until `library.remove_files` removes them.

        Raises:
            KubeError: a file cannot be used, or the token would be sent to a server that is not verified.
        """
        if self.kubeconfig is not None:
            config = await _of_kubeconfig(self.kubeconfig)
        else:
            config = Configuration(host=self.url)
            config.ssl_ca_cert = str(self.ca_file) if self.ca_file else None
            if self.token:
                config.api_key["BearerToken"] = f"Bearer {self.token}"
            if self.token_file is not None:
                _read_before_requests(config, self.token_file)
        parts = urlsplit(config.host)
        if not config.verify_ssl:
            raise KubeError(f"insecure-skip-tls-verify of {config.host}: name the certificate-authority")
        if config.api_key and parts.scheme != "https" and parts.hostname not in _LOOPBACK:
            raise KubeError(f"{config.host}: a token is sent over https:// only")
        return config


async def _of_kubeconfig(file: Path) -> Configuration:
    config = Configuration()
    try:
        loader, token_file = _loader(file)
        await loader.load_and_set(config)
    except KubeError:
        raise
    except Exception as error:  # a malformed file can cause any exception
        # The rest may quote an entry of the file, with its token.
        reason = str(error).partition("{")[0] or type(error).__name__
        raise KubeError(f"{file} cannot be used as a kubeconfig file: {reason}") from None
    if token_file is not None:
        _read_before_requests(config, token_file)
    return config


def _loader(file: Path) -> tuple[KubeConfigLoader, Path | None]:
    """Return the loader of the current context, and the file with the token of its user."""
    file.stat()  # its error for a missing file is clearer than the library's
    merged: Any = KubeConfigMerger(str(file)).config
    loader = KubeConfigLoader(merged, config_base_path=None)
    context: Any = loader.current_context
    name = context["context"].get("user")
    found = merged["users"].get_with_name(name, safe=True) if name else None
    user = found["user"].value if found else {}
    if "exec" in user or "auth-provider" in user:
        raise KubeError(
            f"{file}: its user needs a program to log in, and none is started here: make a token "
            "(kubectl create token) and set c.GPUShareKube.api_server and token_file"
        )
    return loader, file.absolute().parent / user["tokenFile"] if user.get("tokenFile") else None


def _read_before_requests(config: Configuration, token_file: Path) -> None:
    def read(config: Configuration) -> None:
        try:
            config.api_key["BearerToken"] = f"Bearer {token_file.read_text(encoding='utf-8').strip()}"
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise KubeError(f"the token file {token_file} cannot be read: {reason}") from None

    config.api_key["BearerToken"] = ""  # without an entry the library does not call the hook
    config.refresh_api_key_hook = read
