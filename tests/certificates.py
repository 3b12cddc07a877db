"""Make certificates that an authority of the test signs; they are valid for a day."""

from __future__ import annotations

import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from jupyter_gpushare.protocol.helper_tls import BROKER, HELPER, TlsFiles


class Authority:
    """A certificate authority: a private key and its self-signed certificate, in one folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self.certificate = folder / f"{name}.crt"
        self._signs = make_certificate(self.certificate, folder / f"{name}.key", name)

    def issue(self, name: str, days: float = 1, usage: x509.ObjectIdentifier | None = None) -> TlsFiles:
        """Write a certificate for a DNS name, and its key; return the paths."""
        files = files_of(name, self._folder, self.certificate)
        make_certificate(files.certificate, files.key, name, signed_by=self._signs, days=days, usage=usage)
        return files


def make_certificate(
    certificate: Path,
    key: Path,
    name: str = "127.0.0.1",
    *,
    signed_by: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None = None,
    days: float = 1,
    usage: x509.ObjectIdentifier | None = None,
) -> tuple[x509.Name, ec.EllipticCurvePrivateKey]:
    """Write a certificate and its private key; without ``signed_by`` it is self-signed."""
    private = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer, signing = signed_by or (subject, private)
    now, public = datetime.datetime.now(datetime.UTC), private.public_key()
    is_ip = name.replace(".", "").isdigit()
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signed_by is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address(name)) if is_ip else x509.DNSName(name)]),
            critical=False,
        )
    )
    if signed_by is None:
        builder = builder.add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    if usage is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    pem = serialization.Encoding.PEM
    secret = private.private_bytes(
        pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    key.touch(0o600)
    key.write_bytes(secret)
    certificate.write_bytes(builder.sign(signing, hashes.SHA256()).public_bytes(pem))
    return subject, private


def files_of(name: str, folder: Path, authority: Path | None = None) -> TlsFiles:
    """Return the paths of a certificate that an `Authority` issued in a folder."""
    return TlsFiles(
        certificate=folder / f"{name}.crt",
        key=folder / f"{name}.key",
        authority=authority or folder / "ca.crt",
    )


def broker_and_helper(folder: Path) -> tuple[TlsFiles, TlsFiles]:
    """Write two certificates of one authority into a folder: the broker's, and one for all helpers."""
    authority = Authority(folder)
    return authority.issue(BROKER), authority.issue(HELPER)


def helper_options(files: TlsFiles) -> tuple[str, ...]:
    """Return the command-line options of a helper with this certificate."""
    return (
        *("--tls-certificate", str(files.certificate), "--tls-key", str(files.key)),
        *("--tls-ca", str(files.authority)),
    )


def broker_settings(files: TlsFiles) -> dict[str, str]:
    """Return the settings of GPUShareKube for a broker with this certificate."""
    return {
        "helper_certificate_file": str(files.certificate),
        "helper_key_file": str(files.key),
        "helper_ca_file": str(files.authority),
    }
