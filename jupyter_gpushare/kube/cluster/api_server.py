"""Where the API server is, and how to authenticate: a pod's service account, or a kubeconfig file."""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jupyter_gpushare.errors import GpuShareError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubeError(GpuShareError):
    """The API server refused (``status``), or does not answer (``status`` 0)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """URL of an API server, and how to authenticate to it."""

    url: str
    token_file: Path | None = None  # read again when it may have changed
    token: str = ""
    ca_file: Path | None = None  # neither this nor `ca_pem`: the certificate authorities of the system
    ca_pem: str = ""
    client_pem: str = ""  # certificate and key of a user

    def __post_init__(self) -> None:
        """Refuse to authenticate to a server that is not verified.

        Raises:
            KubeError: the URL is no ``https://``, but for one of this machine.
        """
        parts = urlsplit(self.url)
        is_here = parts.hostname in ("127.0.0.1", "::1", "localhost")
        if parts.scheme != "https" and (self.token or self.token_file) and not is_here:
            raise KubeError(f"{self.url}: a token is sent over https:// only")

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

    @classmethod
    def of_kubeconfig(cls, file: Path) -> ApiServer:
        """Return the API server of the current context of a kubeconfig file.

        Raises:
            KubeError: the file cannot be read, or asks for what is not supported; the text says what to
                change.
        """
        config = _read(file)
        context = _named(config, "contexts", "context", str(config.get("current-context", "")), file)
        cluster = _named(config, "clusters", "cluster", str(context.get("cluster", "")), file)
        user = _named(config, "users", "user", str(context.get("user", "")), file)
        if cluster.get("insecure-skip-tls-verify"):
            raise KubeError(
                f"{file}: insecure-skip-tls-verify is not supported: name the certificate-authority"
            )
        if "exec" in user or "auth-provider" in user:
            raise KubeError(
                f"{file}: its user needs a program to log in, and none is started here: make a token "
                "(kubectl create token) and set c.GPUShareKube.api_server and token_file"
            )
        folder = file.absolute().parent
        pair = (_pem(user, key, folder) for key in ("client-certificate", "client-key"))
        return cls(
            url=str(cluster.get("server", "")),
            ca_pem=_pem(cluster, "certificate-authority", folder),
            token=str(user.get("token", "")),
            token_file=folder / user["tokenFile"] if user.get("tokenFile") else None,
            client_pem="".join(pair),
        )

    def tls(self) -> ssl.SSLContext | bool:
        """Return what the client verifies the server with, and shows of itself.

        Raises:
            KubeError: a certificate or key cannot be read.
        """
        if not (self.ca_file or self.ca_pem or self.client_pem):
            return True
        try:
            context = ssl.create_default_context(cafile=self.ca_file, cadata=self.ca_pem or None)
            if self.client_pem:
                # The library takes a certificate from a file only.
                with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".pem") as pair:
                    pair.write(self.client_pem)
                    pair.flush()
                    context.load_cert_chain(pair.name)
        except (OSError, ssl.SSLError) as error:
            raise KubeError(f"the certificates for {self.url} cannot be used: {error}") from None
        return context


def _read(file: Path) -> Mapping[str, Any]:
    try:
        import yaml
    except ImportError:
        raise KubeError("a kubeconfig file needs PyYAML: pip install 'jupyter-gpushare[kube]'") from None
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise KubeError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise KubeError(f"{file} is no YAML file") from None
    if not isinstance(found, dict):
        raise KubeError(f"{file} is no kubeconfig file")
    return found


def _named(config: Mapping[str, Any], plural: str, kind: str, name: str, file: Path) -> Mapping[str, Any]:
    entries = config.get(plural)
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind), dict):
            found: Mapping[str, Any] = entry[kind]
            return found
    raise KubeError(f"{file} has no {kind} {name!r}: choose one with kubectl config use-context")


def _pem(entry: Mapping[str, Any], key: str, folder: Path) -> str:
    """A certificate or key: from the file that ``key`` names, or from ``key-data``."""
    try:
        if data := entry.get(f"{key}-data"):
            return base64.b64decode(data, validate=True).decode()
        return (folder / entry[key]).read_text(encoding="utf-8") if entry.get(key) else ""
    except OSError as error:
        raise KubeError(f"{key} {entry[key]} cannot be read: {error.strerror}") from None
    except (binascii.Error, UnicodeDecodeError, TypeError):
        raise KubeError(f"{key} of the kubeconfig file is not understood") from None
