"""The ways that pages take between workers: one line per backend, the best first.

Names only, so that a command line can list them without loading any.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kv_transfer.backends.base import Backend, Site

AUTO = "auto"  # the best way that both ends prove
NONE = "none"  # no pages leave the pool, or come there

BACKENDS = {
    "cuda_ipc": "kv_transfer.backends.cuda_ipc:CudaIpcBackend",
    "shm": "kv_transfer.backends.shm:ShmBackend",
    "grpc": "kv_transfer.backends.stream:StreamBackend",
}


def backend(name: str) -> Callable[[Site], Backend]:
    """What makes a backend of the table."""
    return cast("Callable[[Site], Backend]", pkgutil.resolve_name(BACKENDS[name]))
