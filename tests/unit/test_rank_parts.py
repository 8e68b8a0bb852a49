"""Pages between groups of ranks of any two sizes: every rank gets its heads of every page, and nothing else.

The specification is a slice of the pages of one rank that has all heads.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from eyas.common.errors import TransferFailed
from eyas.common.types import RankPages
from eyas.common.wire.pool import PoolInfo, RankPool
from eyas.engine.kv import staging
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.kv.rank_pages import PagesByHeads
from eyas.engine.kv.slots import SlotAllocator
from eyas.engine.kv.staging import PageStaging, StagingInlet
from eyas.engine.states.shape import DeltaShape
from eyas.engine.states.store import StateFormat, StateStore
from kv_transfer.area import DeviceArea
from kv_transfer.backends import nixl
from kv_transfer.backends.base import BackendSite, CopyJob, CopyResult, PeerSource, TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.backends.rdma_slots import RdmaSlotsBackend
from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.copier import PageCopier
from kv_transfer.copy_threads import CopyDone
from kv_transfer.layout import RankPools
from kv_transfer.peers import PeerRoute
from tests.unit.fake_nixl import FakeNixl

PAGES, SLOTS, WINDOW = 9, 6, 2
HEADS = KvFormat(layers=2, kv_heads=4, head_dim=16)
LATENTS = KvFormat(layers=2, kv_heads=1, head_dim=24, latent=16)
STATES = StateFormat((0, 2), DeltaShape(4, 8, key_size=8, value_size=4, kernel=4), 64, torch.bfloat16)
STATE_SLOTS = 2
KINDS = {
    "heads": (HEADS, torch.bfloat16),
    "states": (HEADS, torch.bfloat16),
    "fp8": (HEADS, torch.float8_e4m3fn),
    "latents": (LATENTS, torch.float32),
}


@pytest.fixture(autouse=True)
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The played library copies no faster than one core."""
    monkeypatch.setattr(nixl, "SLOW", 0.0)


class Group:
    """A group's pools, filled with random bytes, and staging beside them that a backend serves."""

    def __init__(self, folder: Path, kind: str, ranks: int, seed: int, way: Way) -> None:
        form, dtype = KINDS[kind]
        states = replace(STATES, shape=STATES.shape.of_rank(ranks)) if kind == "states" else None
        slots = 0 if states is None else STATE_SLOTS
        self.shape = PoolShape(form.of_rank(ranks), PAGES, 4, dtype, states=states, slots=slots)
        self.pool = KvPool(self.shape)
        self.ranks = [self.pool.pages, *(torch.empty_like(self.pool.pages) for _ in range(1, ranks))]
        for rank, pages in enumerate(self.ranks):
            noise = torch.Generator().manual_seed(10 * seed + (0 if form.latent else rank))
            pages.view(torch.uint8).random_(generator=noise)
        self.staging = PageStaging(self.pool, folder / f"staging-{seed}", SLOTS, self.ranks[1:])
        areas = tuple(DeviceArea(pages.data_ptr(), self.shape.geometry) for pages in self.ranks)
        slots = self.staging.make_device_slots() if way.on_device else ()
        self.backend = way.backend(BackendSite(self.staging.area, str(folder), way.wire, areas, slots))
        self.slots = SlotAllocator(range(SLOTS))
        self.before = [self.bytes(rank) for rank in range(ranks)]

    def bytes(self, rank: int) -> np.ndarray:
        """A copy of a rank's pages, uint8 [pages + 1, page rows, heads, bytes of a head]."""
        pages, geometry = self.ranks[rank].view(torch.uint8).numpy().copy(), self.shape.geometry
        return pages.reshape(self.shape.all_pages + 1, geometry.page_rows, geometry.kv_heads, -1)

    def whole(self, pages: list[np.ndarray]) -> np.ndarray:
        """What one rank with all heads has; of latents each has everything."""
        return pages[0] if self.shape.geometry.replicated else np.concatenate(pages, axis=2)

    def states(self, slot: int) -> dict[str, torch.Tensor]:
        """What all ranks together have of a slot, by heads: whole numbers of the same bytes."""
        found: dict[str, list[torch.Tensor]] = {}
        for pages in self.ranks:
            memory = pages.view(torch.uint8)[self.shape.pages : self.shape.all_pages].clone()
            store = StateStore(self.shape.states, memory.view(STATE_SLOTS, -1))
            form = store.format.shape
            wide = [form.key_heads * form.key_size] * 2 + [form.value_heads * form.value_size]
            for name in ("tails", "inputs"):
                numbers = store.parts[name][slot].view(torch.int16)
                for part, columns in zip("qkv", numbers.split(wide, -1), strict=True):
                    found.setdefault(name + part, []).append(columns)
            found.setdefault("states", []).append(
                store.parts["states"][slot].view(torch.int32).transpose(1, -1)
            )
            for part, columns in zip(
                "ab", store.parts["gates"][slot].view(torch.int32).chunk(2, -1), strict=True
            ):
                found.setdefault("gates" + part, []).append(columns)
        return {name: torch.cat(parts, -1) for name, parts in found.items()}

    def proof(self, rank: int) -> int:
        return zlib.crc32(self.bytes(rank)[self.shape.all_pages].tobytes())

    def info(self) -> PoolInfo:
        ranks = []
        for rank in range(len(self.ranks)):
            export = self.backend.export(rank)
            assert export is not None
            ranks.append(RankPool(rank, self.proof(rank), {"way": export}))
        return PoolInfo(1, "hash", self.shape.geometry, tuple(ranks))

    def close(self) -> None:
        assert self.backend.close(time.monotonic() + 5.0)
        self.pool.close()


class Owner:
    """The fronts between a puller and the owner's staging. `staged`: what was asked for: pages of a rank."""

    def __init__(self) -> None:
        self.group: Group
        self.asked: list[CopyJob] = []
        self.taken: list[tuple[int, int]] = []  # parts of pages, and slots for them
        self._staged: list[tuple[CopyJob, tuple[int, ...]]] = []
        self._waiting: list[CopyJob] = []
        self._slots: dict[tuple[int, int], list[int]] = {}
        self._over: list[CopyDone[CopyJob]] = []

    def stage(self, job: CopyJob) -> None:
        self.asked.append(job)
        self._waiting.append(job)
        self._begin()

    def _begin(self) -> None:
        while self._waiting:
            job = self._waiting[0]
            slots = self.group.slots.take(self.group.staging.slots_for(job.count, job.part.source))
            if slots is None:
                return
            self._copy(self._waiting.pop(0), slots)

    def _copy(self, job: CopyJob, slots: list[int]) -> None:
        self._slots[job.name] = slots
        self.taken.append((job.count, len(slots)))
        then = lambda error: self._staged.append((job, tuple(slots)))  # noqa: E731
        self.group.staging.copy_out(job.source.pages, slots, then, job.part.source)

    def read(self, job: CopyJob) -> None:
        self.group.slots.give(self._slots.pop(job.name))
        self._over.append(CopyDone(job, 0, 0.0, None))
        self._begin()

    def staged(self, mine: Container[Any] = ()) -> list[tuple[CopyJob, tuple[int, ...]]]:
        self.group.staging.poll()
        staged, self._staged = self._staged, []
        return staged

    def let_go(self, mine: Container[Any] = ()) -> list[CopyDone[CopyJob]]:
        over, self._over = self._over, []
        return over


@dataclass(frozen=True)
class Way:
    """A backend of both ends, and the puller's wire."""

    backend: Callable[[BackendSite], TransferBackend]
    wire: Any
    on_device: bool = False

    @classmethod
    def named(cls, name: str, wire: Any) -> Way:
        nixl = FakeNixl()
        if name == "nixl":
            return cls(lambda site: NixlBackend(site, lambda: nixl), wire)
        if name == "rdma_slots":
            return cls(lambda site: RdmaSlotsBackend(site, lambda: nixl), wire, on_device=True)
        return cls(TcpBackend, wire)


class Pair:
    """A puller and an owner."""

    def __init__(self, folder: Path, kind: str, there: int, here: int, by: str) -> None:
        self.owner = Owner()
        way = Way.named(by, self.owner)
        self.there = self.owner.group = Group(folder, kind, there, 1, way)
        self.here = Group(folder, kind, here, 2, way)
        inlet = StagingInlet(self.here.staging, self.here.slots)
        self.copier = PageCopier({by: self.here.backend}, WINDOW, inlet)
        self.info = self.there.info()
        self.ours = RankPools(self.here.shape.geometry, here, divides=True)

    def route(self, rank: int) -> PeerRoute:
        source: PeerSource = self.here.backend.open(self.info.ranks[rank].exports["way"])
        parts = self.ours.parts(self.info, rank, source.on_device)
        return PeerRoute(self.here.backend, source, parts)

    def copy(self, *jobs: CopyJob) -> list[CopyResult]:
        for job in jobs:
            self.copier.submit(self.route(job.source.rank), job)
        results, deadline = [], time.monotonic() + 20.0
        while len(results) < len(jobs):
            assert time.monotonic() < deadline
            results += self.copier.finished()
            time.sleep(2e-4)
        return results

    def close(self) -> None:
        self.here.close()
        self.there.close()


@contextlib.contextmanager
def pair(folder: Path, kind: str, there: int, here: int, by: str = "tcp") -> Iterator[Pair]:
    made = Pair(folder, kind, there, here, by)
    try:
        yield made
    finally:
        made.close()


SRC, DST = (7, 0, 3, 4, 8), (1, 2, 6, 5, 0)


CASES = (
    *(("heads", there, here, "rdma_slots") for there in (1, 2, 4) for here in (1, 2, 4)),
    *(("heads", there, here, by) for there, here in ((2, 1), (1, 2), (4, 2)) for by in ("tcp", "nixl")),
    *(("fp8", there, here, "tcp") for there, here in ((2, 1), (1, 4))),
    *(("latents", there, here, by) for there, here in ((4, 2), (1, 2)) for by in ("tcp", "rdma_slots")),
)


@pytest.mark.parametrize(("kind", "there", "here", "by"), CASES)
def test_every_rank_gets_its_heads_and_nothing_else(
    tmp_path: Path, kind: str, there: int, here: int, by: str
) -> None:
    with pair(tmp_path, kind, there, here, by) as made:
        jobs = [CopyJob(1, rank, RankPages(rank, SRC), DST) for rank in range(there)]
        results = made.copy(*jobs)
        assert all(result.ok and result.path == by for result in results)
        wanted = made.here.whole(made.here.before).copy()
        wanted[list(DST)] = made.there.whole(made.there.before)[list(SRC)]
        found = [made.here.bytes(rank) for rank in range(here)]
        if made.here.shape.geometry.replicated:
            assert all((one == wanted).all() for one in found)
        else:
            assert (made.here.whole(found) == wanted).all()
        page = made.here.shape.page_bytes
        assert sum(result.bytes for result in results) == len(SRC) * page * here
        assert made.here.slots.free == made.there.slots.free == SLOTS
        assert all(job.part.width == 0 for job in made.owner.asked) == (there == here or kind == "latents")


@pytest.mark.parametrize(("there", "here"), [(1, 1), (2, 1), (1, 2)])
def test_scattered_pages_are_copied_by_two_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int, here: int
) -> None:
    """As many as there are, not one by one."""
    monkeypatch.setattr(staging, "FEW_RUNS", 0)
    test_every_rank_gets_its_heads_and_nothing_else(tmp_path, "heads", there, here, "rdma_slots")


@pytest.mark.parametrize(
    ("there", "here", "by"),
    [(2, 1, "tcp"), (1, 2, "tcp"), (4, 2, "nixl"), (1, 4, "rdma_slots"), (2, 1, "rdma_slots"), (2, 2, "tcp")],
)
def test_recurrent_states_come_by_their_heads(tmp_path: Path, there: int, here: int, by: str) -> None:
    """Whatever windows cut a slot into: beside pages of keys and values, into another slot."""
    with pair(tmp_path, "states", there, here, by) as made:
        each = made.here.shape.slot_pages
        assert each > 3 and each == made.there.shape.slot_pages
        slots = [tuple(range(PAGES + slot * each, PAGES + (slot + 1) * each)) for slot in range(STATE_SLOTS)]
        wanted, stays = made.there.states(1), made.here.states(1)
        jobs = [CopyJob(1, r, RankPages(r, (*SRC, *slots[1])), (*DST, *slots[0])) for r in range(there)]
        assert all(result.ok for result in made.copy(*jobs))
        found, other = made.here.states(0), made.here.states(1)
        assert all(torch.equal(found[name], part) for name, part in wanted.items())
        assert all(torch.equal(other[name], part) for name, part in stays.items())
        pages = made.here.whole([made.here.bytes(rank) for rank in range(here)])
        kept = made.here.whole(made.here.before)
        kept[list(DST)] = made.there.whole(made.there.before)[list(SRC)]
        assert (pages[:PAGES] == kept[:PAGES]).all()


@pytest.mark.parametrize(
    ("by", "there", "taken"),
    [("rdma_slots", 1, {(2, 1), (1, 1)}), ("tcp", 1, {(2, 2), (1, 1)}), ("rdma_slots", 2, {(4, 4), (1, 1)})],
)
def test_a_slot_of_a_device_takes_as_many_parts_as_fit(
    tmp_path: Path, by: str, there: int, taken: set[tuple[int, int]]
) -> None:
    """So a window of parts has as many bytes as one of whole pages, and is as short in coming. (Two slots of
    ours are a window here, of whatever size.)
    """
    with pair(tmp_path, "heads", there, 3 - there, by) as made:
        made.copy(*(CopyJob(1, rank, RankPages(rank, SRC), DST) for rank in range(there)))
        assert set(made.owner.taken) == taken


@pytest.mark.parametrize("by", ["tcp", "rdma_slots"])
@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2), (4, 2), (2, 2)])
def test_a_proof_is_the_whole_page_of_a_rank_in_its_parts(
    tmp_path: Path, there: int, here: int, by: str
) -> None:
    with pair(tmp_path, "heads", there, here, by) as made:
        for rank in range(there):
            for proof, right in ((made.there.proof(rank), True), (7, False)):
                job = CopyJob(1, 2 * rank + right, RankPages(rank, (PAGES,)), (3,), proof)
                (result,) = made.copy(job)
                assert result.ok == right and result.job is job
                assert right or isinstance(result.error, TransferFailed)
        assert [made.here.bytes(rank).tobytes() for rank in range(here)] == [
            one.tobytes() for one in made.here.before
        ], "a proof ends in staging"


def test_other_heads_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that begins one head later than it should."""
    gather = PagesByHeads.gather

    def made_wrong(self, pages, share):
        return gather(self, pages, msgspec.structs.replace(share, first=share.first ^ 1))

    monkeypatch.setattr(PagesByHeads, "gather", made_wrong)
    with pair(tmp_path, "heads", 1, 4) as made:
        (result,) = made.copy(CopyJob(1, 0, RankPages(0, (PAGES,)), (3,), made.there.proof(0)))
        assert not result.ok
