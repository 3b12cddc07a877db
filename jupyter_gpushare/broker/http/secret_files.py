"""Files with the broker's secrets: the key of its certificate, the spawner token, the cookie secret."""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from jupyter_gpushare.errors import StoreError

# ---- the broker's own certificate, which callers on other machines pin -------

# A pinned certificate is replaced before it expires; X.509 requires an end.
_VALID_DAYS = 36_500


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the server's TLS context; a missing key and certificate are created.

    Raises:
        StoreError: they cannot be created or used.
    """
    try:
        if not (certificate.exists() and key.exists()):
            _make_certificate(certificate, key)
        if key.stat().st_mode & 0o077:
            raise StoreError(f"{key} can be read by others: chmod 600 it")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"{certificate}: {error}") from None
    return context


def _make_certificate(certificate: Path, key: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gpushare broker")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for path, content, mode in ((key, secret, 0o600), (certificate, signed.public_bytes(pem), 0o644)):
        path.unlink(missing_ok=True)
        _write_new(path, content, mode)


# ---- the token and the cookie secret -----------------------------------------


def secret_file(path: Path) -> str:
    """Return the secret in a file that only the broker's user can read; a missing file is created.

    Raises:
        StoreError: others can read the file, or it cannot be created.
    """
    try:
        if not path.exists() or not path.stat().st_size:
            _write_new(path, secrets.token_hex(32).encode(), 0o600)
        if path.stat().st_mode & 0o077:
            raise StoreError(f"{path} can be read by others: chmod 600 it")
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Create a file atomically; replace an empty one, which a full disk may have left."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content)
            file.flush()
            os.fsync(fd)
        try:
            os.link(name, path)
        except FileExistsError:
            if not path.stat().st_size:
                os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
