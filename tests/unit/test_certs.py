"""`eyas certs` with an authority of one's own, and with what is none."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import PolicyBuilder, Store

from eyas.cli import main
from eyas.common.security.tls import AUTHORITY, CERTIFICATE

NOW = datetime.datetime.now(datetime.UTC)
ORGANISATION = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Firma")
NAMED = [ORGANISATION, x509.NameAttribute(NameOID.COMMON_NAME, "Root")]
EC = ec.generate_private_key(ec.SECP256R1())


def own(folder: Path, key: Any = EC, subject: Any = NAMED, *, ca: bool = True, password: bytes = b"") -> None:
    """An authority that somebody made elsewhere."""
    name = x509.Name(subject)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(7).not_valid_before(NOW - datetime.timedelta(1))
    built = built.not_valid_after(NOW + datetime.timedelta(900))
    built = built.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    identifier = x509.SubjectKeyIdentifier(b"its own way")
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"),
        False,
    )
    signs = x509.KeyUsage(True, key_cert_sign=ca, crl_sign=ca, decipher_only=False, **usage)
    built = built.add_extension(signs, critical=True).add_extension(identifier, critical=False)
    (folder / AUTHORITY).write_bytes(
        built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    (folder / "ca.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))


@pytest.mark.parametrize("subject", [NAMED, [ORGANISATION]])
@pytest.mark.parametrize("rsa_key", [False, True])
def test_the_issuer_is_the_authoritys_whole_subject(tmp_path: Path, subject: Any, rsa_key: bool) -> None:
    own(tmp_path, rsa.generate_private_key(65537, 2048) if rsa_key else EC, subject)
    long = ".".join(["a" * 60] * 3)
    assert main(["certs", str(tmp_path), "--names", f"{long},gate.example"]) == 0
    authority = x509.load_pem_x509_certificate((tmp_path / AUTHORITY).read_bytes())
    made = x509.load_pem_x509_certificate((tmp_path / "door" / CERTIFICATE).read_bytes())
    assert made.issuer == authority.subject
    for name in (long, "gate.example"):
        verifier = PolicyBuilder().store(Store([authority])).build_server_verifier(x509.DNSName(name))
        verifier.verify(made, [])


@pytest.mark.parametrize(
    ("more", "flags", "sentence"),
    [
        ({"ca": False}, [], "the certificate is no authority's: it may not sign others"),
        ({"password": b"secret"}, [], "the authority's key is encrypted"),
        ({}, ["--days", "901"], "would outlive their authority"),
        ({}, ["--days", "99999999"], "--days 99999999: no calendar goes so far"),
        ({}, ["--days", "9" * 30], "is no whole number from 1 to"),
        ({}, ["--names", "a" * 64], "is not a host name"),
        ({}, ["--names", ".".join(["a" * 60] * 5)], "is not a host name"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, more: Any, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own(tmp_path, **more)
    try:
        code = main(["certs", str(tmp_path), *flags])
    except SystemExit as left:  # of the parser
        code = left.code
    said = capsys.readouterr().err
    assert code == 2
    assert sentence in said and "Traceback" not in said
    assert not (tmp_path / "door" / CERTIFICATE).exists()
