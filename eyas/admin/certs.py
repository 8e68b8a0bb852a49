"""`eyas certs DIR`: certificates for the services of a cluster, and for its gateway's callers.

    DIR/ca.crt, DIR/ca.key             the cluster's authority; its key stays where it was made
    DIR/services/ca.crt, tls.crt, tls.key    what --tls-dir names, for every service
    DIR/door/tls.crt, tls.key          what --ssl-certfile and --ssl-keyfile name, for the gateway

An authority that is there already signs again: certificates are renewed without a change of authority.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

from eyas.admin.authority import CertificateAuthority, CertificatePair
from eyas.common.errors import ConfigError
from eyas.common.security.tls import AUTHORITY, CERTIFICATE, KEY, NAME

AUTHORITY_KEY = "ca.key"
SERVICES, DOOR = "services", "door"


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
