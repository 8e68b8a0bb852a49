"""Builds the transfer of an engine's KV pages: backends, their memory, staging for pools without a file.

It puts the parts together, and says what pullers learn of each pool.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from eyas.common.machine.gpus import number_of
from eyas.common.types import KvKind, Role
from eyas.common.wire.pool import Export, PoolInfo, RankPool
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.front_wire import FrontWire
from eyas.engine.kv.groups import ONE_GROUP
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.pulls import PullManager
from eyas.engine.kv.rank_pools import FollowerPool
from eyas.engine.kv.slots import SlotAllocator
from eyas.engine.kv.stager import StagingOutlet
from eyas.engine.kv.staging import PageStaging, StagingInlet
from eyas.engine.loading.spec import EngineSpec
from kv_transfer import nics
from kv_transfer.area import DeviceArea
from kv_transfer.backends.base import BackendSite, TransferBackend
from kv_transfer.backends.rdma_slots import RdmaSlotsBackend
from kv_transfer.backends.table import AUTO, NONE, backend, usable
from kv_transfer.copier import PageCopier
from kv_transfer.copy_threads import CopyBell, Ring
from kv_transfer.gpu.cuda import CudaDriver
from kv_transfer.host_files import new_path
from kv_transfer.layout import WINDOW_BYTES, RankPools, window_pages
from kv_transfer.lease_board import LeaseBoard
from kv_transfer.nics import RdmaCard
from kv_transfer.peers import KvPeers, PeerRoutes
from kv_transfer.windows import AT_ONCE

STAGED_BYTES = 6 * WINDOW_BYTES
"""For pages on their way out of a pool, and as much for pages on their way in: host memory is page-locked.
One peer gets four windows of these six."""

_log = logging.getLogger("eyas.engine")


@dataclass(frozen=True)
class PageTransfer:
    """The transfer of pages, made once per engine; everything by group. Where pages cannot travel there are
    no `infos`.

    `board`: of the leases, where there will be some. `bell`: rings when a copy has stopped.
    """

    board: LeaseBoard | None
    bell: CopyBell
    pulls: dict[KvKind, PullManager]
    copiers: dict[KvKind, PageCopier]
    layouts: dict[KvKind, str]
    outlets: dict[KvKind, StagingOutlet]
    infos: dict[str, PoolInfo]
    files: dict[str, str]

    @property
    def possible(self) -> bool:
        """True if pages can travel at all."""
        return bool(self.infos)


def travel(spec: EngineSpec, pools: dict[KvKind, KvPool], outbox: EventOutbox) -> PageTransfer:
    """The transfer of pages of pools that share their page numbers."""
    board, peers, bell = _board(spec, pools), KvPeers(spec.config.pool_dir), CopyBell()
    shown = {} if board is None else board.export()
    reaches = {
        group: _reach(spec, group, pool, FrontWire(outbox), bell.ring) for group, pool in pools.items()
    }
    moving = {group: reach for group, reach in reaches.items() if reach.backends}
    windows = {group: window_pages(pool.shape.page_bytes) for group, pool in pools.items()}
    copiers = {group: reach.copier(windows[group]) for group, reach in reaches.items()}
    routes = {
        group: PeerRoutes(reach.backends, spec.config.transfer, reach.pools(spec, group))
        for group, reach in reaches.items()
    }
    size, numbers = spec.config.page_size, itertools.count(1)
    return PageTransfer(
        board=board,
        bell=bell,
        pulls={
            group: PullManager(
                *(copiers[group], routes[group], reach.wire, size, outbox, numbers, peers),
                groups=spec.groups if group is KvKind.TARGET else ONE_GROUP,
                state_pages=pools[group].shape.slot_pages,
            )
            for group, reach in reaches.items()
        },
        copiers=copiers,
        layouts={group: spec.layout_hash(group) for group in moving},
        outlets={group: reach.outlet for group, reach in moving.items() if reach.outlet is not None},
        infos={group.value: reach.info(spec, group, shown) for group, reach in moving.items()},
        files={group.value: reach.path for group, reach in moving.items()},
    )


def _board(spec: EngineSpec, pools: dict[KvKind, KvPool]) -> LeaseBoard | None:
    if spec.config.transfer == NONE or Role.PREFILL not in spec.config.roles:
        return None
    pool = pools[KvKind.TARGET]
    board = LeaseBoard(new_path("leases", Path(spec.config.pool_dir)), pool.shape.all_pages)
    pool.attached.append(board)
    return board


@dataclass(frozen=True)
class _PoolRoute:
    """One pool, as other workers reach it.

    `checksums`: of the proof pages, by rank. `path`: the file of the pool, or of the staging beside it.
    """

    wire: FrontWire
    backends: dict[str, TransferBackend]
    checksums: tuple[int, ...] = ()
    path: str = ""
    outlet: StagingOutlet | None = None
    inlet: StagingInlet | None = None

    def copier(self, window: int) -> PageCopier:
        return PageCopier(self.backends, window, self.inlet)

    def pools(self, spec: EngineSpec, group: KvKind) -> RankPools:
        """The pools that pages come to."""
        return RankPools(spec.geometry(group), spec.config.tensor_parallel_size, self.inlet is not None)

    def info(self, spec: EngineSpec, group: KvKind, board: Export) -> PoolInfo:
        ranks = tuple(self._rank(rank, checksum) for rank, checksum in enumerate(self.checksums))
        arithmetic = spec.page_arithmetic(group)
        return PoolInfo(spec.epoch, spec.layout_hash(group), spec.geometry(group), ranks, board, arithmetic)

    def _rank(self, rank: int, checksum: int) -> RankPool:
        exports = {name: backend.export(rank) for name, backend in self.backends.items()}
        offered = {name: export for name, export in exports.items() if export is not None}
        return RankPool(rank, checksum, offered)


def _reach(spec: EngineSpec, group: KvKind, pool: KvPool, wire: FrontWire, ring: Ring) -> _PoolRoute:
    if spec.config.transfer == NONE:
        return _PoolRoute(wire, {})
    if pool.area is None or spec.config.tensor_parallel_size > 1:
        return _beside(spec, group, pool, wire, ring)
    site = BackendSite(pool.area, spec.config.pool_dir, wire, host=_host(spec), cards=_cards(spec), ring=ring)
    return _PoolRoute(wire, _backends(spec, site), (pool.checksum,), pool.area.path)


@dataclass(frozen=True)
class OtherRank:
    """A further rank's pool as rank 0 has it: also as a tensor; and the checksum of its proof page."""

    area: DeviceArea
    pages: torch.Tensor
    checksum: int


def other_ranks(spec: EngineSpec, group: KvKind, pool: KvPool) -> list[OtherRank]:
    """Maps the pools of the other ranks until `pool` is closed."""
    first, geometry = number_of(spec.config.device), spec.geometry(group)
    others = []
    for rank in range(1, spec.config.tensor_parallel_size):
        other = FollowerPool.at(spec.giver(group, rank), geometry, partial(CudaDriver, first + rank))
        pool.attached.append(other)
        pages = other.pages(pool.shape, f"cuda:{first + rank}")
        others.append(OtherRank(other.area, pages, other.checksum))
    return others


def _beside(spec: EngineSpec, group: KvKind, pool: KvPool, wire: FrontWire, ring: Ring) -> _PoolRoute:
    """The pools of a device, or of several: staging beside them, for the ways that need some."""
    others = other_ranks(spec, group, pool) if spec.config.tensor_parallel_size > 1 else []
    window = window_pages(pool.shape.page_bytes)
    slots = max(AT_ONCE * window, min(STAGED_BYTES // pool.shape.page_bytes, pool.shape.all_pages))
    out = slots if Role.PREFILL in spec.config.roles else 0
    back = slots if set(spec.config.roles) != {Role.PREFILL} else 0
    path = new_path(group.value, Path(spec.config.pool_dir))
    staging = PageStaging(pool, path, out + back, [other.pages for other in others], ring)
    text = "staging of %s KV: %d pages to leave and %d to come, %.0f MiB in %s"
    _log.info(text, group, out, back, staging.area.pages.nbytes / 2**20, staging.area.path)
    devices = (pool.device_area(), *(other.area for other in others))
    own = staging.make_device_slots() if _reads_devices(spec) else ()
    where = (spec.config.pool_dir, wire, devices, own, _host(spec), _cards(spec), ring)
    site = BackendSite(staging.area, *where)
    return _PoolRoute(
        wire,
        _backends(spec, site),
        (pool.checksum, *(other.checksum for other in others)),
        staging.area.path,
        StagingOutlet(staging, SlotAllocator(range(out)), proof=pool.shape.all_pages),
        StagingInlet(staging, SlotAllocator(range(out, out + back))),
    )


def _reads_devices(spec: EngineSpec) -> bool:
    """Whether slots in the devices' memory have a reader: a NIC, or who says so."""
    name = RdmaSlotsBackend.name
    return name in usable(spec.config.encrypted) and (
        spec.config.transfer == name or (spec.config.transfer == AUTO and bool(nics.folders()))
    )


def _host(spec: EngineSpec) -> str:
    """This worker's host, as handles name it, without the port."""
    return spec.config.worker.rpartition(":")[0].strip("[]")


def _cards(spec: EngineSpec) -> tuple[RdmaCard, ...] | None:
    """The cards that --transfer-devices names. Raises ConfigError for one that this host does not have."""
    names = spec.config.transfer_devices
    return tuple(nics.named(names)) if names else None


def _backends(spec: EngineSpec, site: BackendSite) -> dict[str, TransferBackend]:
    return {name: backend(name)(site) for name in usable(spec.config.encrypted)}
