"""Runs a draft head on a device for sequences that other engines decode; the plain twin is `DraftRunner`.

The tables are those of a target engine's steps, each sequence in a slot of its own: what changes there per
batch is the length and the pages that are new. The host sends one array of integers and one of features per
batch, and waits for the proposals. A sequence that has lost its slot to others is simply written down again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from eyas.common.config import MOST_STEPS, SpeculationConfig
from eyas.engine.batch.rows import DecodeRows, Rows
from eyas.engine.batch.tables import Tables, TableWrites
from eyas.engine.batch.tree import DraftTree
from eyas.engine.kernels import row_ring
from eyas.engine.kv.pool import KvPool
from eyas.engine.speculation.device import DeviceProposer
from eyas.engine.speculation.draft_runner import Asked, Proposed


@dataclass
class _Seat:
    """A sequence's slot, and how many of its pages the tables know."""

    slot: int
    pages: int = 0


class Seats:
    """Who has which slot: the least recently asked for makes room for a new sequence."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._taken: OrderedDict[Hashable, _Seat] = OrderedDict()
        self.count = slots

    def of(self, owner: Hashable) -> _Seat:
        """Its seat, a new one if it has none. Between two calls for it there may be `count` - 1 others."""
        seat = self._taken.pop(owner, None)
        if seat is None:
            slot = self._free.pop() if self._free else self._taken.popitem(last=False)[1].slot
            seat = _Seat(slot)
        self._taken[owner] = seat
        return seat


class DeviceDraftRunner:
    """`proposer`: over `tables`; `firsts` int32 [slots] is its. `tile_rows`: of a tile, at most. `width`: of
    the head's features.
    """

    def __init__(
        self, proposer: DeviceProposer, tables: Tables, firsts: torch.Tensor, tile_rows: int, width: int
    ) -> None:
        self._proposer = proposer
        self.tables = tables
        self._firsts = firsts
        self._tile_rows = tile_rows
        self._width = width
        self._seats = Seats(tables.padding_slot)
        self.alignment = proposer.pool.shape.page_size  # a page table has a place per page of positions

    @property
    def pool(self) -> KvPool:
        """The pool of the draft KV."""
        return self._proposer.pool

    def draft_rows(self, spec: SpeculationConfig) -> int:
        """How many rows behind the certain ones `draft` may write: its own shape's, whatever `spec` wants."""
        own = self._proposer.spec
        return own.steps * own.topk

    @torch.inference_mode()
    def draft(self, asked: SequenceOf[Asked], spec: SpeculationConfig) -> list[Proposed]:
        """As `DraftRunner.draft`, of this engine's own shape, cut to `spec`."""
        proposed: list[Proposed] = []
        for first in range(0, len(asked), self._seats.count):
            some = asked[first : first + self._seats.count]
            proposed += [Proposed(_cut(tree, spec), None, whole) for tree, whole in self._batch(some)]
        return proposed

    def _batch(self, asked: SequenceOf[Asked]) -> list[tuple[DraftTree, bool]]:
        """For at most as many sequences as there are slots: the proposal of each, and whether it is whole."""
        few = self._proposer.path_rows
        by_length = sorted(asked, key=lambda one: len(one.extension.tokens) > few)  # stable: short runs first
        slots, writes = self._seated(by_length)
        packed = _Packed(by_length, slots, few, self.alignment)
        told = packed.words(self._tile_rows) | {"places": writes[0], "words": writes[1]}
        on = _sent(told, self.pool.shape.device)
        self.tables.apply(torch.stack((on["places"], on["words"])))
        self._firsts.index_copy_(0, on["slots"].long(), on["lowest"])
        rounds = DecodeRows(on["slots"][: packed.short], on["starts"], few) if packed.short else None
        tiles = on["tiles"].view(-1, 4) if packed.long else None
        rows = Rows(on["tokens"], on["positions"], on["kv_rows"], rounds, tiles, firsts=self._firsts)
        features, lost = self._features(packed, len(asked))
        self._proposer.draft(features, rows, on["last"], on["slots"], self._proposer.spec)
        answers = self._proposals(on["slots"], lost)
        found = {one.owner: answer for one, answer in zip(by_length, answers, strict=True)}
        return [found[one.owner] for one in asked]

    def _features(self, packed: _Packed, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, width], from the host and from rings; and int32 [count]: 1 where some were in none."""
        shape = self.pool.shape
        lost = torch.zeros(count, dtype=torch.int32, device=shape.device)
        ringed = packed.ringed()
        if ringed is None:
            return packed.features(self._width).to(shape.device, shape.dtype), lost
        features = torch.zeros(packed.count, self._width, dtype=shape.dtype, device=shape.device)
        if packed.near:
            features.copy_(packed.features(self._width))
        there = torch.from_numpy(ringed).to(shape.device)
        row_ring.take(there[:2], there[2], features, lost)
        return features, lost

    def _seated(self, asked: SequenceOf[Asked]) -> tuple[list[int], np.ndarray]:
        """Each one's slot, and what is new about them, int32 [2, n] for `Tables.apply`."""
        writes, slots = TableWrites(self.tables), []
        for one in asked:
            seat, new = self._seats.of(one.owner), one.extension
            if not seat.pages:
                writes.occupy(seat.slot, one.params, one.choice, speculative=MOST_STEPS)
            first = new.offset // self.alignment
            writes.put("pages", seat.slot, new.pages[seat.pages :], start=first + seat.pages)
            writes.put("length", seat.slot, (new.offset + new.base + len(new.tokens),))
            seat.pages = len(new.pages)
            slots.append(seat.slot)
        return slots, writes.array()

    def _proposals(self, slots: torch.Tensor, lost: torch.Tensor) -> list[tuple[DraftTree, bool]]:
        """What the tables have for each slot, and that nothing is `lost`. Waits for the device."""
        both = [table.index_select(0, slots) for table in (self.tables.drafts, self.tables.parents)]
        answers, most = [], both[0].shape[1]
        for missing, *words in torch.cat((lost[:, None], *both), 1).cpu().tolist():
            drafts, parents = words[:most], words[most:]
            count = drafts.index(-1) if -1 in drafts else most
            answers.append((DraftTree(drafts[:count], parents[:count]), not missing))
        return answers


class _Packed:
    """Sequences with their slots, those of up to `few` rows first: these take `few` rows each, the others
    what they have.
    """

    def __init__(self, asked: SequenceOf[Asked], slots: SequenceOf[int], few: int, page_size: int) -> None:
        self._asked, self._slots, self._few, self._page_size = asked, slots, few, page_size
        self._counts = [len(one.extension.tokens) for one in asked]
        self.short = sum(count <= few for count in self._counts)
        self.long = len(asked) - self.short
        taken = [few] * self.short + self._counts[self.short :]
        self._firsts = np.cumsum([0, *taken]).tolist()  # each one's first row, and the number of all rows
        self.count = self._firsts[-1]

    def words(self, tile_rows: int) -> dict[str, np.ndarray]:
        """int32 arrays, by what they are."""
        tokens, positions, kv_rows = np.zeros((3, self._firsts[-1]), np.int32)
        kv_rows[:] = -1
        for one, first, count in zip(self._asked, self._firsts, self._counts, strict=False):
            new, here = one.extension, slice(first, first + count)
            rows = np.arange(new.base, new.base + count)
            tokens[here], positions[here] = new.tokens, new.offset + rows
            pages = np.array(new.pages[new.base // self._page_size :])
            inside = rows // self._page_size - new.base // self._page_size
            kv_rows[here] = pages[inside] * self._page_size + rows % self._page_size
        ends = [first + count - 1 for first, count in zip(self._firsts, self._counts, strict=False)]
        starts = [one.extension.offset + one.extension.base for one in self._asked]
        small = {
            "slots": self._slots,
            "starts": starts[: self.short],
            "last": ends,
            "lowest": [one.lowest for one in self._asked],
            "tiles": self._tiles(starts, tile_rows),
        }
        arrays = {name: np.array(values, np.int32) for name, values in small.items()}
        return {"tokens": tokens, "positions": positions, "kv_rows": kv_rows} | arrays

    def _tiles(self, starts: list[int], tile_rows: int) -> list[int]:
        """(slot, first row behind the short runs, its position, rows) of each tile, one after the other."""
        tiles: list[int] = []
        for i in range(self.short, len(self._asked)):
            first = self._firsts[i] - self._firsts[self.short]
            for at in range(0, self._counts[i], tile_rows):
                rows = min(tile_rows, self._counts[i] - at)
                tiles += [self._slots[i], first + at, starts[i] + at, rows]
        return tiles

    @property
    def near(self) -> bool:
        """Has the host features of any row?"""
        return any(one.extension.features.shape[0] for one in self._asked)

    def features(self, width: int) -> torch.Tensor:
        """float32 [rows, width]: those that the host has; zeros for others."""
        features = torch.zeros(self.count, width)
        for one, first in zip(self._asked, self._firsts, strict=False):
            if len(near := one.extension.features):
                features[first : first + len(near)] = near
        return features

    def ringed(self) -> np.ndarray | None:
        """Int64 [3, rows]: the address (0: none) and the tag of each in a ring, and whose it is; None: all
        are from the host.
        """
        if not any(one.extension.ringed for one in self._asked):
            return None
        found = np.zeros((3, self.count), np.int64)
        for owner, (one, first) in enumerate(zip(self._asked, self._firsts, strict=False)):
            start = first + one.extension.features.shape[0]
            here = found[:, start : start + len(one.extension.ringed)]
            if one.extension.ringed:
                here[:2], here[2] = np.array(one.extension.ringed, np.int64).T, owner
        return found


def _sent(arrays: dict[str, np.ndarray], device: str) -> dict[str, torch.Tensor]:
    """The arrays on the device, by one copy; each stands on 16 bytes there."""
    ends = np.cumsum([-(-len(array) // 4) * 4 for array in arrays.values()]).tolist()
    told = np.zeros(ends[-1], np.int32)
    for first, array in zip([0, *ends], arrays.values(), strict=False):
        told[first : first + len(array)] = array
    there = torch.from_numpy(told).to(device)
    parts = zip(arrays.items(), [0, *ends], strict=False)
    return {name: there[first : first + len(array)] for (name, array), first in parts}


def _cut(tree: DraftTree, spec: SpeculationConfig) -> DraftTree:
    """No larger than `spec` says."""
    return tree.truncate_depth(spec.steps).thin(spec.topk).narrow(spec.width - 1)
