"""Workers as a router sees them."""

from __future__ import annotations

import msgspec

from eyas.common.types import Role, WorkerInfo
from gateway.routing.router import (
    RouterCandidate,
)

PREFILL, DECODE, DRAFT = (Role.PREFILL,), (Role.DECODE,), (Role.DRAFT,)


def worker(name: str, roles: tuple[Role, ...], **changes: object) -> RouterCandidate:
    info = WorkerInfo(name, roles, 1, "m", "f", "d", 2048, 1000, 100)
    in_flight = changes.pop("in_flight", 0)
    connected = changes.pop("connected", True)
    cached = changes.pop("cached", 0)
    return RouterCandidate(msgspec.structs.replace(info, **changes), in_flight, connected, cached)
