"""Which backend moves a peer's pages: decided once a peer and epoch, from what is known and not by trying.

It knows files and the configured wish. What a backend does is its own business.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path

from eyas.common.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Route(enum.StrEnum):
    """A backend's name, as timings and metrics show it."""

    SHM = "shm"
    GRPC = "grpc"


def pool_identity(path: str) -> str:
    """Names one file among those of all hosts; empty if there is none. Equal identities: the same memory.

    (A boot id is of one running kernel; a device and an inode, of one file of its.)
    """
    try:
        info = os.stat(path)
    except (OSError, ValueError):  # (a name that no file can have)
        return ""
    return f"{_BOOT_ID.read_text().strip()}/{info.st_dev}/{info.st_ino}"


@dataclass(frozen=True)
class Routes:
    """`transfer`: auto, or the one route that may be taken. `pool_dir`: where pools of this host lie."""

    transfer: str
    pool_dir: str

    def choose(self, pool: str, identity: str) -> Route:
        """For the pool that its owner knows as the file `pool`, with this `identity`.

        Raises ConfigError if only shm may be taken and the file is not here.
        """
        if self.transfer == Route.GRPC:
            return Route.GRPC
        if identity and Path(pool).parent == Path(self.pool_dir) and pool_identity(pool) == identity:
            return Route.SHM
        if self.transfer == Route.SHM:
            raise ConfigError(
                f"the peer's KV pool {pool} is not a file in {self.pool_dir} of this host, "
                "and transfer is shm, which allows no other way",
                param="transfer",
            )
        return Route.GRPC
