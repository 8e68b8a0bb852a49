"""Certificates for tests: a cluster's, another cluster's, and some with one thing wrong."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from eyas.admin import certs
from eyas.admin.certs import CertificateAuthority, CertificatePair
from eyas.common.config import CertificateFiles
from eyas.common.security.tls import AUTHORITY, CERTIFICATE, KEY, NAME

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificates:
    """What `eyas certs` writes to `folder`, and more that its authority signs."""

    folder: Path

    @property
    def services(self) -> str:
        return str(self.folder / certs.SERVICES)

    @property
    def ca(self) -> str:
        return str(self.folder / AUTHORITY)

    @property
    def door(self) -> CertificateFiles:
        door = self.folder / certs.DOOR
        return CertificateFiles(str(door / CERTIFICATE), str(door / KEY))

    def signed(
        self, name: str = NAME, valid: datetime.timedelta = DAY, *, client: bool = True
    ) -> tuple[bytes, bytes]:
        """(certificate, key) by this authority."""
        own = CertificatePair(
            (self.folder / AUTHORITY).read_bytes(), (self.folder / certs.AUTHORITY_KEY).read_bytes()
        )
        pair = CertificateAuthority.load(own).signed(
            [name], datetime.datetime.now(datetime.UTC) + valid, client=client
        )
        return pair.certificate, pair.key

    def service_folder(self, where: Path, certificate: bytes, key: bytes) -> str:
        """A folder for --tls-dir with our authority and this certificate."""
        where.mkdir()
        for name, content in (
            (AUTHORITY, (self.folder / AUTHORITY).read_bytes()),
            (CERTIFICATE, certificate),
            (KEY, key),
        ):
            (where / name).write_bytes(content)
        return str(where)


def make(folder: Path) -> Certificates:
    certs.write(folder, ["localhost", "127.0.0.1"], DAY)
    return Certificates(folder)
