"""Short runs of rows on a device, drafted for in batches of fixed sizes: each size is a graph where there are
any, and the same launches without.

Everything that a batch must be told goes there by one copy, everything it gives comes back by another. It
knows the layout of both and the launches between them; which sequence sits in which slot, and what a long run
needs, it does not know.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from eyas.engine.batch.rows import DecodeRows, Rows
from eyas.engine.batch.sections import sections
from eyas.engine.batch.tables import Tables
from eyas.engine.batch.tree import DraftTree
from eyas.engine.kernels import row_ring
from eyas.engine.kernels.launching import CAPTURE
from eyas.engine.speculation.device import DeviceProposer
from eyas.engine.speculation.draft_runner import Asked, Extension

WRITES = 4
"""Changes to the tables that a batch has room for, per sequence: new pages. More go there before it."""


@dataclass(frozen=True)
class DraftState:
    """What the batches of a draft worker share on its device. `firsts` int32 [slots]: as the proposer has it.
    `width`: of the head's features.
    """

    proposer: DeviceProposer
    tables: Tables
    firsts: torch.Tensor
    width: int

    @property
    def device(self) -> str:
        """As torch names it."""
        return self.proposer.pool.shape.device

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.proposer.pool.page_size


@dataclass(frozen=True)
class _Layout:
    """Of what a batch of `batch` sequences with up to `few` rows each is told, in words of 4 bytes."""

    batch: int
    few: int

    @property
    def rows(self) -> int:
        return self.batch * self.few

    @cached_property
    def sections(self) -> dict[str, tuple[int, int]]:
        """First word and number of words of each part. `ends`: rows that each sequence then has; `last`: its
        newest of these rows; `rings`: int64 [2, rows], address and tag; `places`, `words`: of table writes.
        """
        whole = ("tokens", "positions", "kv_rows")
        each = ("slots", "starts", "ends", "last", "lowest")
        counts = dict.fromkeys(whole, self.rows) | dict.fromkeys(each, self.batch) | {"rings": 4 * self.rows}
        counts |= dict.fromkeys(("places", "words"), WRITES * self.batch)
        return sections(counts)


@dataclass(frozen=True)
class _Memory:
    """What batches are told, in one block: `words` int32 from `begin` on, features before it. So a batch's
    part is one piece, with its features or without, and no float of one is a whole number of another.
    """

    words: torch.Tensor
    begin: int

    def parts(self, layout: _Layout) -> dict[str, torch.Tensor]:
        """The parts of a batch's words."""
        own = self.words[self.begin :]
        return {name: own[first : first + count] for name, (first, count) in layout.sections.items()}

    def near(self, layout: _Layout, width: int) -> torch.Tensor:
        """Float32 [rows, width]: features that come from the host."""
        own = self.words[self.begin - layout.rows * width : self.begin]
        return own.view(torch.float32).view(-1, width)

    def told(self, layout: _Layout, width: int) -> torch.Tensor:
        """All words of a batch, behind its features of `width`; 0: without these."""
        return self.words[self.begin - layout.rows * width : self.begin + layout.sections["all"][1]]


class _Program:
    """The launches for one layout, on fixed memory: the same calls run eagerly and into a graph."""

    def __init__(self, state: DraftState, layout: _Layout, inputs: _Memory, results: torch.Tensor) -> None:
        self._state, self._layout = state, layout
        self._part = inputs.parts(layout)
        self._near = inputs.near(layout, state.width)
        dtype, device = state.proposer.pool.shape.dtype, state.device
        self._features = torch.empty(layout.rows, state.width, dtype=dtype, device=device)
        self._owners = torch.arange(layout.rows, device=device) // layout.few
        self._lost = torch.zeros(layout.batch, dtype=torch.int32, device=device)
        self._results = results[: layout.batch]

    def run(self) -> None:
        """The tables' new entries, features, rows and proposals; then what became of it, as `ShortRuns` reads
        it.
        """
        state, part, tables = self._state, self._part, self._state.tables
        whose = part["slots"].long()
        tables.apply(torch.stack((part["places"], part["words"])))
        tables.length.index_copy_(0, whose, part["ends"])
        state.firsts.index_copy_(0, whose, part["lowest"])
        self._features.copy_(self._near)
        self._lost.zero_()
        rings = part["rings"].view(torch.int64).view(2, -1)
        row_ring.take(rings, self._owners, self._features, self._lost)
        rounds = DecodeRows(part["slots"], part["starts"], self._layout.few)
        rows = Rows(part["tokens"], part["positions"], part["kv_rows"], rounds, firsts=state.firsts)
        proposer = state.proposer
        proposer.draft(self._features, rows, part["last"], part["slots"], proposer.spec)
        self._results.copy_(_facts(tables, whose, self._lost))


@dataclass(frozen=True)
class _Captured:
    """A program whose launches are recorded, and whose memory the graph uses."""

    program: _Program
    graph: torch.cuda.CUDAGraph


class ShortRuns:
    """Of up to `few` rows each, for up to as many sequences as there are slots. `sizes`: ascending batches
    that others are filled up to; a larger one is taken as it is.
    """

    def __init__(self, state: DraftState, sizes: SequenceOf[int]) -> None:
        self._state = state
        self._sizes = sizes
        self.few = state.proposer.path_rows
        most, self._nodes = state.tables.padding_slot, state.tables.drafts.shape[1]
        largest = _Layout(most, self.few)
        begin = -(-largest.rows * state.width // 4) * 4
        words = torch.zeros(begin + largest.sections["all"][1], dtype=torch.int32, device=state.device)
        self._inputs = _Memory(words, begin)
        self._told = _Memory(torch.zeros_like(words, device="cpu", pin_memory=state.device != "cpu"), begin)
        self._results = torch.zeros(most, 1 + 2 * self._nodes, dtype=torch.int32, device=state.device)
        self._found = torch.zeros_like(self._results, device="cpu", pin_memory=state.device != "cpu")
        self._layouts: dict[int, _Layout] = {}  # by batch, as are the graphs and the parts on the host
        self._graphs: dict[int, _Captured] = {}
        self._views: dict[int, dict[str, np.ndarray]] = {}

    @torch.inference_mode()
    def draft(
        self, asked: SequenceOf[Asked], slots: SequenceOf[int], writes: np.ndarray
    ) -> list[tuple[DraftTree, bool]]:
        """The proposal for each, in the slot that it has, and whether all its features were there.

        `writes` int32 [2, n]: what is new about them, for `Tables.apply`; not their lengths. Waits.
        """
        layout = self._layout(len(asked))
        if writes.shape[1] > WRITES * layout.batch:
            self._state.tables.apply(torch.from_numpy(writes).to(self._state.device))
            writes = writes[:, :0]
        self._pack(layout, asked, slots, writes)
        self._send(layout, self._pack_features(layout, asked))
        captured = self._graphs.get(layout.batch)
        if captured is None:
            _Program(self._state, layout, self._inputs, self._results).run()
        else:
            captured.graph.replay()
        return self._answers(len(asked))

    @torch.inference_mode()
    def capture(self) -> None:
        """Records a graph for each size, all in one pool of memory; no two are replayed at once."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            layout = self._layout(size)
            self._pack(layout, (), (), np.zeros((2, 0), np.int32))
            self._send(layout, 0)
            program = _Program(self._state, layout, self._inputs, self._results)
            program.run()  # compiles and loads what it needs
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=CAPTURE):
                program.run()
            self._graphs[size] = _Captured(program, graph)

    def _send(self, layout: _Layout, width: int) -> None:
        self._inputs.told(layout, width).copy_(self._told.told(layout, width), non_blocking=True)

    def _layout(self, count: int) -> _Layout:
        """The least that holds so many sequences; it is made once."""
        place = bisect_left(self._sizes, count)
        size = self._sizes[place] if place < len(self._sizes) else count
        return self._layouts.setdefault(size, _Layout(size, self.few))

    def answers(self, slots: torch.Tensor, lost: torch.Tensor) -> list[tuple[DraftTree, bool]]:
        """As `draft`, of `slots` int64 [n] that others have drafted for. `lost` int32 [n]. Waits."""
        self._results[: len(slots)].copy_(_facts(self._state.tables, slots, lost))
        return self._answers(len(slots))

    def _answers(self, count: int) -> list[tuple[DraftTree, bool]]:
        found = self._found[:count]
        found.copy_(self._results[:count], non_blocking=True)
        if self._state.device != "cpu":
            torch.cuda.current_stream().synchronize()
        answers, most = [], self._nodes
        for missing, *words in found.tolist():
            drafts, parents = words[:most], words[most:]
            nodes = drafts.index(-1) if -1 in drafts else most
            answers.append((DraftTree(drafts[:nodes], parents[:nodes]), not missing))
        return answers

    def _pack(
        self, layout: _Layout, asked: SequenceOf[Asked], slots: SequenceOf[int], writes: np.ndarray
    ) -> None:
        """Writes down what the batch is to be told."""
        part, count = self._parts(layout), len(asked)
        starts = [one.extension.offset + one.extension.base for one in asked]
        counts = [len(one.extension.tokens) for one in asked]
        part["slots"][:count] = slots
        part["slots"][count:] = padding = self._state.tables.padding_slot
        for name, values in {
            "starts": starts,
            "ends": [start + rows for start, rows in zip(starts, counts, strict=True)],
            "last": [i * self.few + rows - 1 for i, rows in enumerate(counts)],
            "lowest": [one.lowest for one in asked],
        }.items():
            part[name][:count], part[name][count:] = values, 0
        self._pack_rows(part, [one.extension for one in asked])
        some = writes.shape[1]
        part["places"][:some], part["words"][:some] = writes
        part["places"][some:] = self._state.tables.places("choice", padding, 0, 1)[0]  # of padding: always 0
        part["words"][some:] = 0

    def _parts(self, layout: _Layout) -> dict[str, np.ndarray]:
        """Of what the host sends. `addresses` and `tags`: those of `rings`."""
        found = self._views.get(layout.batch)
        if found is None:
            found = {name: words.numpy() for name, words in self._told.parts(layout).items()}
            found["addresses"], found["tags"] = found["rings"].view(np.int64).reshape(2, -1)
            self._views[layout.batch] = found
        return found

    def _pack_rows(self, part: dict[str, np.ndarray], news: SequenceOf[Extension]) -> None:
        few, size = self.few, self._state.page_size
        tokens: list[int] = []
        positions: list[int] = []
        kv_rows: list[int] = []
        addresses: list[int] = []
        tags: list[int] = []
        for new in news:
            count, pages, near = len(new.tokens), new.pages, [0] * new.features.shape[0]
            rest, rows = [0] * (few - count), range(new.base, new.base + count)
            tokens += [*new.tokens, *rest]
            positions += [*range(new.offset + new.base, new.offset + new.base + count), *rest]
            kv_rows += [pages[row // size] * size + row % size for row in rows]
            kv_rows += [-1] * (few - count)
            addresses += [*near, *[row[0] for row in new.ringed], *rest]
            tags += [*near, *[row[1] for row in new.ringed], *rest]
        end = len(tokens)
        lists = {"tokens": tokens, "positions": positions, "addresses": addresses, "tags": tags}
        for name, values in lists.items():
            part[name][:end], part[name][end:] = values, 0
        part["kv_rows"][:end], part["kv_rows"][end:] = kv_rows, -1

    def _pack_features(self, layout: _Layout, asked: SequenceOf[Asked]) -> int:
        """Those that the host has; their width, 0 if it has none."""
        if not any(one.extension.features.shape[0] for one in asked):
            return 0
        near = self._told.near(layout, self._state.width).numpy()
        for i, one in enumerate(asked):
            features = one.extension.features
            if count := features.shape[0]:  # else it may have no width either
                near[i * self.few : i * self.few + count] = features.numpy()
        return self._state.width


def _facts(tables: Tables, slots: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """int32 [n, 1 + 2 * drafts]: 1 where a feature was `lost`; then the drafts and their parents."""
    both = [table.index_select(0, slots) for table in (tables.drafts, tables.parents)]
    return torch.cat((lost[:, None], *both), 1)
