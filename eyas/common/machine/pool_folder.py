"""One folder under /dev/shm for everything that the workers of a cluster put there.

The cluster and each of its workers share it, and the last one to leave removes it: the cluster as a rule, a
worker if the cluster was killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from eyas.common.errors import ConfigError
from eyas.common.machine.shared_folder import SharedFolder, enter, leave

PREFIX = "eyas-cluster-"


def new_pool_folder(parent: str) -> SharedFolder:
    """Makes the folder of a cluster, which leaves it after its workers. Raises ConfigError if `parent` cannot
    hold one.
    """
    try:
        return SharedFolder(parent, PREFIX)
    except OSError as error:
        raise ConfigError(f"{parent} cannot hold KV pages: {error.strerror}", param="pool-dir") from None


@contextlib.contextmanager
def living_in(folder: Path) -> Iterator[None]:
    """Keeps a cluster's folder while this worker lives. Any other folder is left as it is.

    Raises ConfigError if a cluster's folder is not there.
    """
    if not folder.name.startswith(PREFIX):
        yield
        return
    try:
        lock = enter(folder)
    except OSError as error:
        message = f"--pool-dir: {folder} cannot be used: {error.strerror}"
        raise ConfigError(message, param="pool-dir") from error
    try:
        yield
    finally:
        leave(folder, lock)
