"""The ways that pages take between workers: one line per backend, the best first.

Names only, so that a command line can list them without loading any.
"""

from __future__ import annotations

import importlib.util
import logging
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kv_transfer.backends.base import BackendSite, TransferBackend

AUTO = "auto"  # the best way that both ends prove
NONE = "none"  # no pages leave the pool, or come there

BACKENDS = {
    "cuda_ipc": "kv_transfer.backends.cuda_ipc:CudaIpcBackend",
    "shm": "kv_transfer.backends.shm:ShmBackend",
    "rdma": "kv_transfer.backends.rdma:RdmaBackend",
    "rdma_slots": "kv_transfer.backends.rdma_slots:RdmaSlotsBackend",
    "nixl": "kv_transfer.backends.nixl:NixlBackend",
    "tcp": "kv_transfer.backends.tcp:TcpBackend",
    "grpc": "kv_transfer.backends.stream:StreamBackend",
}

IN_PLAIN = ("rdma", "rdma_slots", "nixl", "tcp")  # they leave the host, and what they move is not encrypted

_LIBRARIES = {"rdma": "nixl", "rdma_slots": "nixl", "nixl": "nixl"}
"""By backend: a module that not every machine has, which is also the name of its extra."""

_log = logging.getLogger("eyas.pulls")


def missing(name: str) -> str:
    """Why a backend of the table, or AUTO, cannot be used on this machine; empty if it can."""
    library = _LIBRARIES.get(name)
    if library is None or importlib.util.find_spec(library) is not None:
        return ""
    return f"{name} needs a library that is not installed: pip install eyas[{library}]"


def direct(name: str) -> bool:
    """Whether a backend of the table goes from GPU to GPU."""
    return cast("type[TransferBackend]", pkgutil.resolve_name(BACKENDS[name])).direct


def usable(encrypted: bool = False) -> list[str]:
    """The backends whose libraries are here, the best first. `encrypted`: without those of `IN_PLAIN`."""
    for name in BACKENDS:
        if reason := missing(name):
            _log.debug("%s", reason)
    return [name for name in BACKENDS if not missing(name) and not (encrypted and name in IN_PLAIN)]


def backend(name: str) -> Callable[[BackendSite], TransferBackend]:
    """Returns the constructor of a backend of the table."""
    return cast("Callable[[BackendSite], TransferBackend]", pkgutil.resolve_name(BACKENDS[name]))
