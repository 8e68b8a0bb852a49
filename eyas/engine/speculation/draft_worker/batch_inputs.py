"""The input of a batch on a draft worker's device: one pinned block of words, sent by one copy."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from eyas.engine.batch.sections import sections
from eyas.engine.batch.tables import SlotTables
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput

WRITES = 4
"""Changes to the tables that a batch has room for, per sequence: new pages. More go there before it."""


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
            ("ends", [start + rows for start, rows in zip(starts, counts, strict=True)], 0),
            ("last", [i * layout.few + rows - 1 for i, rows in enumerate(counts)], 0),
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
