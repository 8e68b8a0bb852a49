"""Short runs of rows on a device, drafted for in batches of fixed sizes.

Everything that a batch must be told goes there by one copy, everything it gives comes back by another.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.tables import SlotTables
from eyas.engine.batch.tree import DraftTree
from eyas.engine.speculation.device import DeviceProposer
from eyas.engine.speculation.draft_worker.batch_inputs import (
    BatchBuffer,
    BatchInputs,
    BatchLayout,
    BatchMemory,
)
from eyas.engine.speculation.draft_worker.draft_runner import DraftInput
from eyas.engine.speculation.sized_programs import SizedPrograms

WRITES = 4
"""Changes to the tables that a batch has room for, per sequence: new pages. More go there before it."""


@dataclass(frozen=True)
class DraftState:
    """What the batches of a draft worker share on its device. `firsts`: as of `DeviceProposer`.
    `width`: of the head's features.
    """

    proposer: DeviceProposer
    tables: SlotTables
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


def short_layout(batch: int, few: int) -> BatchLayout:
    """Of `batch` sequences with up to `few` rows each."""
    return BatchLayout(batch, few, WRITES * batch)


class ShortProgram:
    """The launches for one layout. `results` int32 [batch or more, ..]: as `ShortRuns` reads them."""

    def __init__(
        self, state: DraftState, layout: BatchLayout, there: BatchMemory, results: torch.Tensor
    ) -> None:
        self._state, self._few = state, layout.few
        self._told = BatchInputs(layout, there, state.width, state.proposer.pool.shape.dtype)
        self._results = results[: layout.batch]

    def run(self) -> None:
        """The tables' new entries, features, rows and proposals; then what became of it."""
        state, told, part = self._state, self._told, self._told.part
        whose = told.take(state.tables, state.firsts)
        rounds = DecodeRows(part["slots"], part["starts"], self._few)
        rows = ForwardRows(part["tokens"], part["positions"], part["kv_rows"], rounds, firsts=state.firsts)
        proposer = state.proposer
        proposer.draft(told.features, rows, part["last"], part["slots"], proposer.spec)
        self._results.copy_(_facts(state.tables, whose, told.lost))


class ShortRuns:
    """Of up to `few` rows each, for up to as many sequences as there are slots. `sizes`: as of
    `SizedPrograms`.
    """

    def __init__(self, state: DraftState, sizes: SequenceOf[int]) -> None:
        self._state = state
        self.few = state.proposer.path_rows
        most, self._nodes = state.tables.padding_slot, state.tables.drafts.shape[1]
        self._layout = cache(lambda batch: short_layout(batch, self.few))
        self._telling = BatchBuffer(self._layout(most), state.width, state.page_size, state.device)
        self._results = torch.zeros(most, 1 + 2 * self._nodes, dtype=torch.int32, device=state.device)
        self._found = torch.zeros_like(self._results, device="cpu", pin_memory=state.device != "cpu")
        self.programs = SizedPrograms(sizes, self._program)

    @torch.inference_mode()
    def draft(
        self, asked: SequenceOf[DraftInput], slots: SequenceOf[int], writes: np.ndarray
    ) -> list[tuple[DraftTree, bool]]:
        """The proposal for each, in the slot that it has, and whether all its features were there.

        `writes` int32 [2, n]: what is new about them, for `SlotTables.apply`; not their lengths. Waits.
        """
        size = self.programs.size(len(asked))
        self._tell(size, asked, slots, writes)
        self.programs.launch(size)
        return self._answers(len(asked))

    @torch.inference_mode()
    def capture(self) -> None:
        """Records a graph for each size."""
        self.programs.capture(lambda size: self._tell(size, (), (), np.zeros((2, 0), np.int32)))

    def answers(self, slots: torch.Tensor, lost: torch.Tensor) -> list[tuple[DraftTree, bool]]:
        """As `draft`, of `slots` int64 [n] that others have drafted for. `lost` int32 [n]. Waits."""
        self._results[: len(slots)].copy_(_facts(self._state.tables, slots, lost))
        return self._answers(len(slots))

    def _program(self, batch: int) -> ShortProgram:
        return ShortProgram(self._state, self._layout(batch), self._telling.there, self._results)

    def _tell(
        self, size: int, asked: SequenceOf[DraftInput], slots: SequenceOf[int], writes: np.ndarray
    ) -> None:
        layout, telling, tables = self._layout(size), self._telling, self._state.tables
        runs = [one.extension for one in asked]
        telling.sequences(layout, asked, slots, tables.padding_slot)
        telling.rows(layout, runs)
        telling.writes(layout, tables, writes)
        telling.send(layout, runs)

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


def _facts(tables: SlotTables, slots: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """int32 [n, 1 + 2 * drafts]: 1 where a feature was `lost`; then the drafts and their parents."""
    both = [table.index_select(0, slots) for table in (tables.drafts, tables.parents)]
    return torch.cat((lost[:, None], *both), 1)
