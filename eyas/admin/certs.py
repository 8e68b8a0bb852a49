"""`eyas certs DIR`: certificates for the services of a cluster, and for its gateway's callers.

    DIR/ca.crt, DIR/ca.key             the cluster's authority; its key stays where it was made
    DIR/services/ca.crt, tls.crt, tls.key    what --tls-dir names, for every service
    DIR/door/tls.crt, tls.key          what --ssl-certfile and --ssl-keyfile name, for the gateway

An authority that is there already signs again: certificates are renewed without a change of authority. It is
for development, and for clusters without an authority of their own.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from eyas.common.errors import ConfigError
from eyas.common.security.tls import AUTHORITY, CERTIFICATE, KEY, NAME

AUTHORITY_KEY = "ca.key"
SERVICES, DOOR = "services", "door"
EARLIER = datetime.timedelta(minutes=5)  # clocks differ
MOST_COMMON = 64  # characters of a certificate's common name; its other names may be longer
AUTHORITY_FOR = datetime.timedelta(days=3650)


def certs(folder: Path, names: Sequence[str], days: int) -> int:
    """Writes the files and says how they are used. Raises ConfigError as `write` does."""
    try:
        write(folder, names, datetime.timedelta(days=days))
    except OverflowError:
        raise ConfigError(f"--days {days}: no calendar goes so far", param="days") from None
    services, door = folder / SERVICES, folder / DOOR
    print(f"every service:  --tls-dir {services}")
    print(f"the gateway:    --ssl-certfile {door / CERTIFICATE} --ssl-keyfile {door / KEY}")
    print(f"its callers:    --url https://... --ca {folder / AUTHORITY}")
    print(f"keep for yourself: {folder / AUTHORITY_KEY}, with which anyone can make more of them")
    return 0


def write(folder: Path, names: Sequence[str], valid: datetime.timedelta) -> None:
    """All files. Raises ConfigError for a folder that cannot be written, or an authority that cannot sign."""
    own, key = folder / AUTHORITY, folder / AUTHORITY_KEY
    until = datetime.datetime.now(datetime.UTC) + valid
    try:
        for made in (folder, folder / SERVICES, folder / DOOR):
            made.mkdir(parents=True, exist_ok=True)
        if own.exists():
            authority = CertificateAuthority.load(CertificatePair(own.read_bytes(), key.read_bytes()))
        else:
            authority = CertificateAuthority.new("an Eyas cluster")
            _put(key, authority.pair.key)
            _put(own, authority.pair.certificate)
        _put(folder / SERVICES / AUTHORITY, authority.pair.certificate)
        for where, called in ((folder / SERVICES, [NAME]), (folder / DOOR, names)):
            pair = authority.signed(called, until, client=where.name == SERVICES)
            _put(where / KEY, pair.key)
            _put(where / CERTIFICATE, pair.certificate)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {error}") from error


def _put(path: Path, content: bytes) -> None:
    """Writes a file that its owner alone can read, if it is a key."""
    mode = 0o600 if path.suffix == ".key" else 0o644
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


@dataclass(frozen=True)
class CertificatePair:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


class CertificateAuthority:
    """Signs certificates. All keys that are made here, its own too, are a curve's (P-256)."""

    def __init__(
        self, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, certificate: x509.Certificate
    ) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def new(cls, name: str) -> CertificateAuthority:
        """A new authority, valid for ten years from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), _name(name), key, _now() + AUTHORITY_FOR)
        usage = _usage(digital_signature=False, key_cert_sign=True, crl_sign=True)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        return cls(key, builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()))

    @classmethod
    def load(cls, pair: CertificatePair) -> CertificateAuthority:
        """One that was saved. Raises ValueError for what is none, or cannot sign."""
        try:
            key = serialization.load_pem_private_key(pair.key, password=None)
        except TypeError:
            raise ValueError("the authority's key is encrypted: it has to be in plain") from None
        except UnsupportedAlgorithm as error:
            raise ValueError(f"the authority's key cannot be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey):
            raise ValueError("the authority's key is neither a curve's nor RSA")
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        if certificate.public_key() != key.public_key():
            raise ValueError("the key is not the certificate's")
        if not _may_sign(certificate):
            raise ValueError("the certificate is no authority's: it may not sign others")
        return cls(key, certificate)

    @property
    def until(self) -> datetime.datetime:
        """How long it is valid."""
        return self._certificate.not_valid_after_utc

    @property
    def _identifier(self) -> x509.AuthorityKeyIdentifier:
        """The identifier of its key in certificates: the one in its own certificate, if it has one."""
        try:
            own = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
        except x509.ExtensionNotFound:
            return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own.value)

    @property
    def pair(self) -> CertificatePair:
        """The authority's certificate and signing key, as they are saved."""
        return CertificatePair(_pem(self._certificate), _key_pem(self._key))

    def signed(self, names: Sequence[str], until: datetime.datetime, *, client: bool) -> CertificatePair:
        """A new certificate and key for a server with these names, hosts or IP addresses.

        `client`: others take it from a client too. Raises ValueError for one that would outlive the
        authority.
        """
        if until > self.until:
            raise ValueError(
                f"certificates until {until:%Y-%m-%d} would outlive their authority ({self.until:%Y-%m-%d})"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if client else [])]
        common = next((name for name in names if len(name) <= MOST_COMMON), "eyas")
        builder = _builder(_name(common), self._certificate.subject, key, until)
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(digital_signature=True, key_cert_sign=False, crl_sign=False), True),
            (x509.ExtendedKeyUsage(purposes), False),
            (x509.SubjectAlternativeName([_general(name) for name in names]), False),
            (self._identifier, False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        return CertificatePair(_pem(builder.sign(self._key, hashes.SHA256())), _key_pem(key))


def _may_sign(certificate: x509.Certificate) -> bool:
    """Does it say that it is an authority, and not that it signs no certificates?"""
    extensions = certificate.extensions
    try:
        if not extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return False
    except x509.ExtensionNotFound:
        return False
    try:
        return extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    except x509.ExtensionNotFound:
        return True


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(_now(), until) - EARLIER)
        .not_valid_after(until)
        .add_extension(identifier, critical=False)
    )


def _usage(*, digital_signature: bool, key_cert_sign: bool, crl_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
