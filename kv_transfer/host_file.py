"""A file that one process of a host names to another, which must find that very file or none.

Containers share names and not files, and so do hosts: a path alone proves nothing. What the file holds, and
how it is read, is the business of those who open it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.common.wire.pool import Export

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostFile:
    """The path of a file, and its identity (`file_identity`)."""

    path: str
    identity: str

    @classmethod
    def at(cls, path: str) -> HostFile:
        """The file that is there now."""
        return cls(path, file_identity(path))

    @classmethod
    def find(cls, export: Export, folder: str) -> HostFile:
        """Returns a peer's exported file, which lies directly in `folder`: a peer may name no other file of
        ours.

        Raises ConfigError if there is no such file, or the peer's file of this name is another one.
        """
        path, identity = (os.fsdecode(export.get(field, b"")) for field in ("path", "identity"))
        there = Path(path).parent == Path(folder) and identity != ""
        if not there or file_identity(path) != identity:
            raise ConfigError(f"the peer's {path!r} is not a file in {folder} of this host")
        return cls(path, identity)

    def export(self) -> Export:
        """Returns the fields by which peers `find` it."""
        return {"path": self.path.encode(), "identity": self.identity.encode()}


def file_identity(path: str) -> str:
    """Names one file among those of all hosts; empty if there is none. Equal identities: the same memory.

    (A boot id is of one running kernel; a device and an inode, of one file of its.)
    """
    try:
        info = os.stat(path)
    except (OSError, ValueError):  # (a name that no file can have)
        return ""
    return f"{_BOOT_ID.read_text().strip()}/{info.st_dev}/{info.st_ino}"
