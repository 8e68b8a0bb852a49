"""What lets an engine's KV pages travel: backends and their areas, staging beside pools that are in no file.

It puts the parts together and says what pullers are told of each pool. What the parts do is their business.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from eyas.common.pool import PoolInfo, RankPool
from eyas.common.types import KvKind, Role
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.front_wire import FrontWire
from eyas.engine.kv.offers import Offers, PoolOffers, StagedOffers
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool, new_pool_path
from eyas.engine.kv.pulls import Pulls
from eyas.engine.kv.slots import Slots
from eyas.engine.kv.staged_copier import StagedCopier
from eyas.engine.kv.staging import Staging
from eyas.engine.loading.spec import EngineSpec
from kv_transfer.area import Area
from kv_transfer.backends.base import Backend, Site
from kv_transfer.backends.table import backend, usable
from kv_transfer.copier import Copier
from kv_transfer.layout import pages_for
from kv_transfer.route import Routes

STAGED_FRACTION = 0.05
"""Of a pool, for pages on their way out, and as much for pages on their way in."""

_log = logging.getLogger("eyas.engine")


@dataclass(frozen=True)
class Travel:
    """Made once per engine; everything by group. Where pages cannot travel there are no `infos`."""

    pulls: dict[KvKind, Pulls]
    copiers: dict[KvKind, Copier]
    offers: dict[KvKind, Offers]
    infos: dict[str, PoolInfo]
    files: dict[str, str]

    @property
    def possible(self) -> bool:
        """Whether pages can travel at all."""
        return bool(self.infos)


def travel(spec: EngineSpec, pools: dict[KvKind, KvPool], pages: PagePool, outbox: Outbox) -> Travel:
    """For pools that share the page numbers of `pages`."""
    reaches = {group: _reach(spec, group, pool, FrontWire(outbox)) for group, pool in pools.items()}
    moving = {group: reach for group, reach in reaches.items() if reach.backends}
    copiers = {group: reach.copier() for group, reach in reaches.items()}
    routes = {group: Routes(reach.backends, spec.config.transfer) for group, reach in reaches.items()}
    size, numbers = spec.config.page_size, itertools.count(1)
    return Travel(
        pulls={
            group: Pulls(copiers[group], routes[group], reach.wire, size, outbox, numbers)
            for group, reach in reaches.items()
        },
        copiers=copiers,
        offers={group: reach.offers(spec.layout_hash(group), pages) for group, reach in moving.items()},
        infos={group.value: reach.info(spec, group) for group, reach in moving.items()},
        files={group.value: reach.area.path for group, reach in moving.items()},
    )


@dataclass(frozen=True)
class _Reach:
    """One pool, as other workers reach it. `out` and `back`: staging slots for pages that leave and come."""

    wire: FrontWire
    area: Area
    backends: dict[str, Backend]
    staging: Staging | None = None
    out: Slots = field(default_factory=lambda: Slots(()))
    back: Slots = field(default_factory=lambda: Slots(()))

    def copier(self) -> Copier:
        if self.staging is None:
            return Copier(self.area, self.backends)
        return StagedCopier(self.backends, self.staging, self.back)

    def offers(self, layout_hash: str, pages: PagePool) -> Offers:
        if self.staging is None:
            return PoolOffers(layout_hash, pages)
        return StagedOffers(layout_hash, pages, self.staging, self.out)

    def info(self, spec: EngineSpec, group: KvKind) -> PoolInfo:
        exports = {name: backend.export() for name, backend in self.backends.items()}
        offered = {name: export for name, export in exports.items() if export is not None}
        rank = RankPool(spec.rank, self.area.checksum(self.area.count), offered)
        geometry = msgspec.structs.replace(spec.geometry(group), pages=self.area.count)
        return PoolInfo(spec.epoch, spec.layout_hash(group), geometry, (rank,))


def _reach(spec: EngineSpec, group: KvKind, pool: KvPool, wire: FrontWire) -> _Reach:
    if pool.area is not None:
        return _Reach(wire, pool.area, _backends(spec, pool.area, wire))
    if set(spec.config.roles) == set(Role):  # it takes whole requests only: no worker sends it pages
        return _Reach(wire, Area(np.empty((1, 0), np.uint8)), {})
    roles, slots = spec.config.roles, staging_slots(spec, pool.shape.pages)
    out = slots if Role.PREFILL in roles else 0
    back = slots if set(roles) != {Role.PREFILL} else 0
    staging = Staging(pool, new_pool_path(group.value, Path(spec.config.pool_dir)), out + back)
    text = "staging of %s KV: %d pages to leave and %d to come, %.0f MiB in %s"
    _log.info(text, group, out, back, staging.area.pages.nbytes / 2**20, staging.area.path)
    backends = _backends(spec, staging.area, wire)
    return _Reach(wire, staging.area, backends, staging, Slots(range(out)), Slots(range(out, out + back)))


def staging_slots(spec: EngineSpec, pages: int) -> int:
    """One way: a fraction of the pool's pages, and no fewer than two prompts of full length take."""
    longest = pages_for(spec.target.context_length, spec.config.page_size)
    return max(math.ceil(STAGED_FRACTION * pages), min(2 * longest, pages))


def _backends(spec: EngineSpec, area: Area, wire: FrontWire) -> dict[str, Backend]:
    site = Site(area, spec.config.pool_dir, wire)
    return {name: backend(name)(site) for name in usable()}
