"""Runs a draft head on a device for sequences that other engines decode; the plain twin is `DraftRunner`.

The tables are those of a target engine's steps, each sequence in a slot of its own: what changes there per
batch is the length and the pages that are new. A sequence that has lost its slot to others is simply written
down again. How short runs become launches is the business of
`eyas.engine.speculation.draft_worker.short_runs`.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import torch

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.rows import ForwardRows
from eyas.engine.batch.tree import DraftTree
from eyas.engine.kernels.exchange import row_ring
from eyas.engine.kv.pool import KvPool
from eyas.engine.speculation.draft_worker.draft_runner import DraftInput, ProposedTree
from eyas.engine.speculation.draft_worker.seats import SeatTables
from eyas.engine.speculation.draft_worker.short_runs import DraftState, ShortRuns

MOST_PASSES = 4
"""Short batches, one behind another, that a run is worth which one alone has no room for."""


class DeviceDraftRunner:
    """Short runs go by `ShortRuns`, in batches of `sizes`; long ones, such as a window, by launches of their
    own. `tile_rows`: of a long run's tile, at most.
    """

    def __init__(self, state: DraftState, sizes: SequenceOf[int], tile_rows: int) -> None:
        self._state = state
        self._proposer = state.proposer
        self.tables = state.tables
        self._tile_rows = tile_rows
        self.short = ShortRuns(state, sizes)
        self.alignment = state.page_size  # a page table has a place per page of positions
        self.seating = SeatTables(state.tables, self.alignment)

    @property
    def pool(self) -> KvPool:
        """The pool of the draft KV."""
        return self._proposer.pool

    def draft_rows(self, spec: SpeculationConfig) -> int:
        """How many rows behind the certain ones `draft` may write: its own shape's, whatever `spec` wants."""
        own = self._proposer.spec
        return own.steps * own.topk

    @torch.inference_mode()
    def draft(self, asked: SequenceOf[DraftInput], spec: SpeculationConfig) -> list[ProposedTree]:
        """As `DraftRunner.draft`, of this engine's own shape, cut to `spec`."""
        proposed: list[ProposedTree] = []
        for first in range(0, len(asked), self.seating.seats.count):
            some = asked[first : first + self.seating.seats.count]
            for tree, whole in self._batch(some):
                proposed.append(ProposedTree(self._cut(tree, spec), whole))
        return proposed

    def _cut(self, tree: DraftTree, spec: SpeculationConfig) -> DraftTree:
        """No larger than `spec` says."""
        own = self._proposer.spec
        if spec.steps >= own.steps and spec.topk >= own.topk and spec.width >= own.width:
            return tree
        return tree.truncate_depth(spec.steps).thin(spec.topk).narrow(spec.width - 1)

    def _batch(self, asked: SequenceOf[DraftInput]) -> list[tuple[DraftTree, bool]]:
        """For at most as many sequences as there are slots: the proposal of each, and whether it is whole."""
        few = self.short.few
        found: dict[Hashable, tuple[DraftTree, bool]] = {}
        runs = [_cut_up(one, few) for one in asked if len(one.extension.tokens) <= MOST_PASSES * few]
        for some in zip_longest(*runs):  # the first rows of all runs, then the next ones
            now = [one for one in some if one is not None]
            slots, writes = self.seating.take(now)
            for one, (tree, whole) in zip(now, self.short.draft(now, slots, writes), strict=True):
                found[one.owner] = tree, whole and found.get(one.owner, (tree, True))[1]
        if long := [one for one in asked if one.owner not in found]:
            found |= self._long(long)
        return [found[one.owner] for one in asked]

    def _long(self, asked: SequenceOf[DraftInput]) -> dict[Hashable, tuple[DraftTree, bool]]:
        """By owner, as `_batch`."""
        slots, writes = self.seating.take(asked)
        packed = _PackedRows(asked, slots, self.alignment)
        told = packed.words(self._tile_rows) | {"places": writes[0], "words": writes[1]}
        on = _sent(told, self.pool.shape.device)
        whose = on["slots"].long()
        self.tables.apply(torch.stack((on["places"], on["words"])))
        self.tables.length.index_copy_(0, whose, on["ends"])
        self._state.firsts.index_copy_(0, whose, on["lowest"])
        tiles, firsts = on["tiles"].view(-1, 4), self._state.firsts
        rows = ForwardRows(on["tokens"], on["positions"], on["kv_rows"], tiles=tiles, firsts=firsts)
        features, lost = self._features(packed, len(asked))
        self._proposer.draft(features, rows, on["last"], on["slots"], self._proposer.spec)
        answers = self.short.answers(whose, lost)
        return {one.owner: answer for one, answer in zip(asked, answers, strict=True)}

    def _features(self, packed: _PackedRows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, width], from the host and from rings; and int32 [count]: 1 where some were in none."""
        shape = self.pool.shape
        lost = torch.zeros(count, dtype=torch.int32, device=shape.device)
        features = packed.features(self._state.width).to(shape.device, shape.dtype)
        if (ringed := packed.ringed()) is not None:
            there = torch.from_numpy(ringed).to(shape.device)
            row_ring.take(there[:2], there[2], features, lost)
        return features, lost


def _cut_up(one: DraftInput, few: int) -> list[DraftInput]:
    """The same rows, up to `few` at a time."""
    new, pieces = one.extension, []
    if len(new.tokens) <= few:
        return [one]
    near = new.features.shape[0]
    for first in range(0, len(new.tokens), few):
        end = first + few
        ringed = new.ringed[max(first - near, 0) : max(end - near, 0)]
        tokens, features = new.tokens[first:end], new.features[first:end]
        piece = replace(new, base=new.base + first, tokens=tokens, features=features, ringed=ringed)
        pieces.append(replace(one, extension=piece))
    return pieces


class _PackedRows:
    """Sequences with their slots, and all rows of one behind those of another."""

    def __init__(self, asked: SequenceOf[DraftInput], slots: SequenceOf[int], page_size: int) -> None:
        self._asked, self._slots, self._page_size = asked, slots, page_size
        self._counts = [len(one.extension.tokens) for one in asked]
        self._firsts = np.cumsum([0, *self._counts]).tolist()  # each one's first row, and the number of rows
        self.count = self._firsts[-1]

    def words(self, tile_rows: int) -> dict[str, np.ndarray]:
        """int32 arrays, by what they are."""
        tokens, positions, kv_rows = np.zeros((3, self.count), np.int32)
        for one, first, count in zip(self._asked, self._firsts, self._counts, strict=False):
            new, here = one.extension, slice(first, first + count)
            rows = np.arange(new.base, new.base + count)
            tokens[here], positions[here] = new.tokens, new.offset + rows
            pages = np.array(new.pages[new.base // self._page_size :])
            inside = rows // self._page_size - new.base // self._page_size
            kv_rows[here] = pages[inside] * self._page_size + rows % self._page_size
        starts = [one.extension.offset + one.extension.base for one in self._asked]
        small = {
            "slots": self._slots,
            "ends": [start + count for start, count in zip(starts, self._counts, strict=True)],
            "last": [end - 1 for end in self._firsts[1:]],
            "lowest": [one.lowest for one in self._asked],
            "tiles": self._tiles(starts, tile_rows),
        }
        arrays = {name: np.array(values, np.int32) for name, values in small.items()}
        return {"tokens": tokens, "positions": positions, "kv_rows": kv_rows} | arrays

    def _tiles(self, starts: list[int], tile_rows: int) -> list[int]:
        """(slot, first row, its position, rows) of each tile, one after the other."""
        tiles: list[int] = []
        for slot, first, start, count in zip(self._slots, self._firsts, starts, self._counts, strict=False):
            for at in range(0, count, tile_rows):
                tiles += [slot, first + at, start + at, min(tile_rows, count - at)]
        return tiles

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
