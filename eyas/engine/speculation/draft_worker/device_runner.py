"""Runs a draft head on a device for sequences that other engines decode; the plain twin is `DraftRunner`.

The tables are those of a target engine's steps, each sequence in a slot of its own: what changes there per
batch is the length and the pages that are new. A sequence that has lost its slot to others is simply written
down again. A batch has up to as many rows of each sequence as a round can make certain; longer runs, such as
windows, take several batches. Everything that a batch needs goes to the device by one copy, of one pinned
block of words; everything it gives comes back by another; between them it is a graph, where its size has one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest

import numpy as np
import torch

from eyas.common.config import MOST_STEPS, SpeculationConfig
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.sections import sections
from eyas.engine.batch.tables import SlotTables, TableWrites
from eyas.engine.batch.tree import NO_TREE, DraftTree
from eyas.engine.kernels.drafts.rounds import RoundRows
from eyas.engine.kernels.exchange import row_ring
from eyas.engine.kernels.launch.recording import GraphRecorder
from eyas.engine.kv.pool import KvPool
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput, ProposedTree
from eyas.engine.speculation.draft_worker.seats import DraftSeats, DraftState, padded_size

WRITES = 12
"""Changes to the tables that a batch has room for, per sequence: all about a new one, or new pages. More go
there before it.
"""


class BatchProgram:
    """The launches for one layout, on memory that stays where it is. `results` int32 [batch or more, 1 or
    `DraftState.result_words`]: whether it drafts too.
    """

    def __init__(
        self, state: DraftState, layout: BatchLayout, memory: BatchMemory, results: torch.Tensor
    ) -> None:
        self._state, self._few, device = state, layout.few, memory.words.device
        self._part = memory.parts(layout)
        self._near = memory.features(layout, state.width)
        dtype = state.proposer.pool.shape.dtype
        self._features = torch.empty(layout.rows, state.width, dtype=dtype, device=device)
        self._lost = torch.zeros(layout.batch, dtype=torch.int32, device=device)
        self._owners = torch.arange(layout.rows, device=device) // layout.few
        self._results = results[: layout.batch]

    def run(self) -> None:
        """The tables' new entries, features and rows; proposals, if it drafts; then what became of it. The
        same calls run at once and into a graph.
        """
        state, tables, part = self._state, self._state.tables, self._part
        slots = part["slots"].long()
        tables.apply(torch.stack((part["places"], part["words"])))
        state.firsts.index_copy_(0, slots, part["lowest"])
        self._features.copy_(self._near)
        self._lost.zero_()
        row_ring.take(part["rings"].view(torch.int64).view(2, -1), self._owners, self._features, self._lost)
        rounds = DecodeRows(part["slots"], part["starts"], self._few)
        results = [self._lost[:, None]]
        if self._results.shape[1] > 1:
            self._draft(slots, rounds)
            results += [table.index_select(0, slots) for table in (tables.drafts, tables.parents)]
        else:
            rows = RoundRows(part["tokens"], part["positions"], part["kv_rows"], part["starts"])
            state.proposer.keep(self._features, rows, rounds)
        self._results.copy_(torch.cat(results, 1))

    def _draft(self, slots: torch.Tensor, rounds: DecodeRows) -> None:
        state, tables, part = self._state, self._state.tables, self._part
        tables.length.index_copy_(0, slots, part["ends"])
        if state.proposer.head.whole or state.proposer.head.block is not None:
            tables.root.index_copy_(0, slots, part["tokens"].index_select(0, part["last"]))
        rows = ForwardRows(part["tokens"], part["positions"], part["kv_rows"], rounds, firsts=state.firsts)
        spec, batch = state.proposer.spec, rounds.slots.shape[0]
        state.proposer.draft(self._features, rows, part["last"], part["slots"], spec, batch)


class DraftBatches:
    """Batches of up to `few` rows of each sequence, one at a time: they draft below these rows, or only write
    their draft KV. `sizes`: as of `DeviceDraftRunner`.
    """

    def __init__(self, state: DraftState, seats: DraftSeats, sizes: SequenceOf[int], *, drafts: bool) -> None:
        self._state, self._seats, self._sizes, most = state, seats, sizes, seats.count
        self.few = state.proposer.path_rows
        self._buffer = BatchBuffer(self._layout(most), state.width, state.tables, state.page_size)
        sizes_of = most, state.result_words if drafts else 1
        self._results = torch.zeros(sizes_of, dtype=torch.int32, device=state.device)
        self._landed = torch.zeros(sizes_of, dtype=torch.int32, pin_memory=state.device != "cpu")
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, BatchProgram]] = {}  # which has what that uses
        self._flying: SequenceOf[DraftInput] = ()

    @torch.inference_mode()
    def capture(self, recorder: GraphRecorder) -> None:
        """Records a graph for each size."""
        for size in reversed(self._sizes):
            self._fill(size, ())
            program = self._program(size)
            program.run()  # compiles and loads what it needs
            graph = torch.cuda.CUDAGraph()
            with recorder.recording(graph):
                program.run()
            self.graphs[size] = graph, program

    def launch(self, inputs: SequenceOf[DraftInput]) -> None:
        """A batch of up to as many inputs as there are seats, of up to `few` rows each. None is in flight."""
        size = padded_size(self._sizes, len(inputs))
        self._fill(size, inputs)
        if (captured := self.graphs.get(size)) is not None:
            captured[0].replay()
        else:
            self._program(size).run()
        self._landed[: len(inputs)].copy_(self._results[: len(inputs)], non_blocking=True)
        self._flying = inputs

    def land(self) -> list[tuple[DraftInput, list[int]]]:
        """The results of each input of the batch in flight; none, if there is none. Waits."""
        flying, self._flying = self._flying, ()
        if flying and self._state.device != "cpu":
            torch.cuda.current_stream().synchronize()
        return list(zip(flying, self._landed[: len(flying)].tolist(), strict=True))

    def _layout(self, size: int) -> BatchLayout:
        return BatchLayout(size, self.few)

    def _program(self, size: int) -> BatchProgram:
        return BatchProgram(self._state, self._layout(size), self._buffer.device, self._results)

    def _fill(self, size: int, inputs: SequenceOf[DraftInput]) -> None:
        """Sends these inputs to the device, in the memory of a batch of this size."""
        writes, slots = TableWrites(self._state.tables), []
        for one in inputs:
            seat, new = self._seats.of(one.owner), one.extension
            if not seat.pages:
                writes.occupy(seat.slot, one.params, one.choice, speculative=MOST_STEPS)
            seat.write_pages(writes, new.pages, new.offset // self._state.page_size)
            slots.append(seat.slot)
        self._buffer.send(self._layout(size), inputs, slots, writes.array())


class DeviceDraftRunner:
    """`sizes`: ascending batches that have a graph once `capture` has run, and that others are filled up to;
    a larger batch is taken as it is.
    """

    def __init__(self, state: DraftState, seats: DraftSeats, sizes: SequenceOf[int]) -> None:
        self._proposer, self.tables = state.proposer, state.tables
        self.alignment = state.page_size  # a page table has a place per page of positions
        self._seats = seats
        self._drafts = DraftBatches(state, seats, sizes, drafts=True)
        self._contexts = DraftBatches(state, seats, sizes, drafts=False)

    @property
    def pool(self) -> KvPool:
        """The pool of the draft KV."""
        return self._proposer.pool

    def draft_rows(self, spec: SpeculationConfig | None) -> int:
        """How many rows behind the certain ones `draft` may write: its own shape's, whatever `spec` wants."""
        own, block = self._proposer.spec, self._proposer.head.block
        if spec is None:
            return 0
        return own.steps * own.topk if block is None else block.width(own.steps)

    def capture(self, recorder: GraphRecorder) -> None:
        """Records a graph for each size."""
        self._drafts.capture(recorder)
        self._contexts.capture(recorder)

    @torch.inference_mode()
    def draft(self, inputs: SequenceOf[DraftInput], spec: SpeculationConfig | None) -> list[ProposedTree]:
        """As `DraftRunner.draft`, of this engine's own shape, cut to `spec`."""
        proposed: list[ProposedTree] = []
        for first in range(0, len(inputs), self._seats.count):
            proposed += self._runs(inputs[first : first + self._seats.count], spec)
        return proposed

    def _cut(self, tree: DraftTree, spec: SpeculationConfig) -> DraftTree:
        """No larger than `spec` says."""
        own = self._proposer.spec
        if spec.steps >= own.steps and spec.topk >= own.topk and spec.width >= own.width:
            return tree
        return tree.truncate_depth(spec.steps).thin(spec.topk).narrow(spec.width - 1)

    def _runs(self, inputs: SequenceOf[DraftInput], spec: SpeculationConfig | None) -> list[ProposedTree]:
        """As `draft`, of at most as many sequences as there are slots. Nothing is drafted below the pieces of
        a run before its last.
        """
        runs, lost = [_cut_up(one, self._drafts.few) for one in inputs], set[Hashable]()
        for some in self._turns(runs if spec is None else [pieces[:-1] for pieces in runs]):
            lost |= _lost_owners(self._contexts.land())
            self._contexts.launch(some)
        trees = [NO_TREE] * len(inputs)
        if spec is not None:
            self._drafts.launch([pieces[-1] for pieces in runs])
            landed = self._drafts.land()
            lost |= _lost_owners(landed)
            trees = [self._cut(self._tree(words), spec) for _, (_, *words) in landed]
        lost |= _lost_owners(self._contexts.land())
        return [ProposedTree(tree, one.owner not in lost) for one, tree in zip(inputs, trees, strict=True)]

    def _tree(self, words: list[int]) -> DraftTree:
        """The proposal that a batch gave for a sequence."""
        most = self.tables.drafts.shape[1]
        drafts, parents = words[:most], words[most:]
        nodes = drafts.index(-1) if -1 in drafts else most
        return DraftTree(drafts[:nodes], parents[:nodes])

    def _turns(self, runs: SequenceOf[list[DraftInput]]) -> Iterator[list[DraftInput]]:
        """The pieces of runs, batch by batch: the first of all runs, then the next ones; all together, if the
        head drafts blocks: of certain rows it reads keys and values alone, and a layer writes these first.
        """
        if self._proposer.head.block is None:
            yield from ([one for one in some if one is not None] for some in zip_longest(*runs))
            return
        pieces, most = list(chain.from_iterable(runs)), self._seats.count
        yield from (pieces[first : first + most] for first in range(0, len(pieces), most))


def _lost_owners(landed: SequenceOf[tuple[DraftInput, list[int]]]) -> set[Hashable]:
    """The owners of inputs with a feature that was lost."""
    return {one.owner for one, (lost, *_) in landed if lost}


def _cut_up(one: DraftInput, few: int) -> list[DraftInput]:
    """The same rows, up to `few` at a time."""
    new, pieces = one.extension, []
    if len(new.tokens) <= few:
        return [one]
    near = new.features.shape[0]
    for first in range(0, len(new.tokens), few):
        end = first + few
        ringed = new.ringed[max(first - near, 0) : max(end - near, 0)]
        tokens, features = new.tokens[first:end], new.features[first:end] if near else new.features
        piece = DraftExtension(new.pages, new.base + first, tokens, features, new.offset, ringed, new.adapter)
        pieces.append(DraftInput(one.owner, piece, one.params, one.choice, one.lowest))
    return pieces


@dataclass(frozen=True)
class BatchLayout:
    """Of a batch of `batch` sequences with up to `few` rows each, in words of 4 bytes."""

    batch: int
    few: int

    @property
    def rows(self) -> int:
        """Of all sequences."""
        return self.batch * self.few

    @property
    def writes(self) -> int:
        """Changes to the tables that it has room for."""
        return WRITES * self.batch

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """First word and number of words of each part. `ends`: rows that each sequence then has; `last`: its
        newest of these rows; `rings`: int64 [2, rows], address and tag; `places`, `words`: of table writes.
        """
        counts = dict.fromkeys(("tokens", "positions", "kv_rows"), self.rows)
        counts |= dict.fromkeys(("slots", "starts", "ends", "last", "lowest"), self.batch)
        counts |= {"rings": 4 * self.rows, "places": self.writes, "words": self.writes}
        return sections(counts)


@dataclass(frozen=True)
class BatchMemory:
    """The memory of batches in one block: `words` int32 from `begin` on, features before it. So a batch's
    part is one piece, with its features or without, and no float of one is a whole number of another.
    """

    words: torch.Tensor
    begin: int

    @classmethod
    def of(cls, largest: BatchLayout, width: int, device: str, *, pinned: bool = False) -> BatchMemory:
        """Zeros for layouts up to the `largest`. `width`: of a feature."""
        begin = -(-largest.rows * width // 4) * 4
        size = begin + largest.sections["all"][1]
        return cls(torch.zeros(size, dtype=torch.int32, device=device, pin_memory=pinned), begin)

    def parts(self, layout: BatchLayout) -> dict[str, torch.Tensor]:
        """The parts of a batch's words."""
        own = self.words[self.begin :]
        return {name: own[first : first + count] for name, (first, count) in layout.sections.items()}

    def features(self, layout: BatchLayout, width: int) -> torch.Tensor:
        """Float32 [rows, width]: features that come from the host."""
        own = self.words[self.begin - layout.rows * width : self.begin]
        return own.view(torch.float32).view(-1, width)

    def block(self, layout: BatchLayout, width: int) -> torch.Tensor:
        """All words of a batch, behind its features of `width`; 0: without these."""
        return self.words[self.begin - layout.rows * width : self.begin + layout.sections["all"][1]]


class BatchBuffer:
    """Both sides of the memory: what the host fills, and `device`, what the device reads."""

    def __init__(self, largest: BatchLayout, width: int, tables: SlotTables, page_size: int) -> None:
        device = str(tables.memory.device)
        self.device = BatchMemory.of(largest, width, device)
        self._host = BatchMemory.of(largest, width, "cpu", pinned=device != "cpu")
        self._width, self._tables, self._page_size = width, tables, page_size
        self._views: dict[int, dict[str, np.ndarray]] = {}  # by batch

    def send(
        self, layout: BatchLayout, inputs: SequenceOf[DraftInput], slots: SequenceOf[int], writes: np.ndarray
    ) -> None:
        """All of a batch goes to the device, with the features that the host has, if it has any. `writes`
        int32 [2, n], for `SlotTables.apply`: what is new about the sequences, but for lengths.
        """
        part = self._parts(layout)
        runs = [one.extension for one in inputs]
        self._sequences(part, layout, inputs, slots)
        self._rows(part, layout, runs)
        self._writes(part, layout, writes)
        width = self._features(layout, runs)
        self.device.block(layout, width).copy_(self._host.block(layout, width), non_blocking=True)

    def _parts(self, layout: BatchLayout) -> dict[str, np.ndarray]:
        """Of what the host sends. `addresses` and `tags`: those of `rings`."""
        part = self._views.get(layout.batch)
        if part is None:
            part = {name: words.numpy() for name, words in self._host.parts(layout).items()}
            part["addresses"], part["tags"] = part["rings"].view(np.int64).reshape(2, -1)
            self._views[layout.batch] = part
        return part

    def _rows(
        self, part: dict[str, np.ndarray], layout: BatchLayout, runs: SequenceOf[DraftExtension]
    ) -> None:
        """All rows of the batch; those behind a run's own are empty."""
        few, size = layout.few, self._page_size
        tokens: list[int] = []
        positions: list[int] = []
        kv_rows: list[int] = []
        addresses: list[int] = []
        tags: list[int] = []
        for new in runs:
            count, pages, near = len(new.tokens), new.pages, [0] * new.features.shape[0]
            rest, rows = [0] * (few - count), range(new.base, new.base + count)
            nowhere = [0] * (few - len(near) - len(new.ringed))
            tokens += [*new.tokens, *rest]
            positions += [*range(new.offset + new.base, new.offset + new.base + count), *rest]
            kv_rows += [pages[row // size] * size + row % size for row in rows]
            kv_rows += [-1] * (few - count)
            addresses += [*near, *[row[0] for row in new.ringed], *nowhere]
            tags += [*near, *[row[1] for row in new.ringed], *nowhere]
        lists = {"tokens": tokens, "positions": positions, "addresses": addresses, "tags": tags}
        for name, values in (lists | {"kv_rows": kv_rows}).items():
            part[name][: len(values)], part[name][len(values) :] = values, -1 if name == "kv_rows" else 0

    def _sequences(
        self,
        part: dict[str, np.ndarray],
        layout: BatchLayout,
        inputs: SequenceOf[DraftInput],
        slots: SequenceOf[int],
    ) -> None:
        """Where each one's certain rows begin and end. The padding slot fills up."""
        starts = [one.extension.offset + one.extension.base for one in inputs]
        counts = [len(one.extension.tokens) for one in inputs]
        for name, values, other in (
            ("slots", slots, self._tables.padding_slot),
            ("starts", starts, 0),
            ("ends", [start + count for start, count in zip(starts, counts, strict=True)], 0),
            ("last", [i * layout.few + count - 1 for i, count in enumerate(counts)], 0),
            ("lowest", [one.lowest for one in inputs], 0),
        ):
            part[name][: len(values)], part[name][len(values) :] = values, other

    def _writes(self, part: dict[str, np.ndarray], layout: BatchLayout, writes: np.ndarray) -> None:
        """Changes to the tables; more than there is room for are made at once."""
        tables, some = self._tables, writes.shape[1]
        if some > layout.writes:
            tables.apply(torch.from_numpy(writes).to(tables.memory.device))
            writes, some = writes[:, :0], 0
        part["places"][:some], part["words"][:some] = writes
        part["places"][some:] = tables.places("choice", tables.padding_slot, 0, 1)[0]  # which is always 0
        part["words"][some:] = 0

    def _features(self, layout: BatchLayout, runs: SequenceOf[DraftExtension]) -> int:
        """Those that the host has; their width, 0 if it has none."""
        if not any(new.features.shape[0] for new in runs):
            return 0
        features = self._host.features(layout, self._width).numpy()
        for i, new in enumerate(runs):
            if count := new.features.shape[0]:  # else it may have no width either
                features[i * layout.few : i * layout.few + count] = new.features.numpy()
        return self._width
