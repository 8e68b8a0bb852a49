"""Rows of features that stay on the device: for the head in the step, and for a drafter elsewhere.

A plain round does not call the head, nor does one whose drafts are looked up alone. Their rows wait in a
ring, and the head takes several at once: before it drafts again, and before the ring is full.

A drafter elsewhere begins with the newest features of a sequence. The step that makes rows certain writes
them (`eyas.engine.kernels.exchange.row_ring`). The host reads them only where such a drafter has to begin
anew, or cannot take a row from GPU to GPU.
"""

from __future__ import annotations

import torch

from eyas.engine.batch.tables import SlotTables
from eyas.engine.batch.window import ROWS
from eyas.engine.kernels.drafts.accepted_path import leave
from eyas.engine.kernels.drafts.rounds import RoundBatch, RoundRows, RoundVerdicts

RING_ROWS = 16
"""Of each sequence: many at once cost the head hardly more than one, until its products bind."""


class FeatureRing:
    """Rows [slots, RING_ROWS, width]: of position p in place p mod RING_ROWS."""

    def __init__(self, tables: SlotTables, width: int, dtype: torch.dtype) -> None:
        self.width = width
        self._tables = tables
        sizes = tables.sizes.slots, RING_ROWS, width
        self._rows = torch.zeros(sizes, dtype=dtype, device=tables.memory.device)

    def keep(self, tapped: torch.Tensor, batch: RoundBatch, verdicts: RoundVerdicts) -> None:
        """tapped [B * W, width] of rounds: the rows that are certain by their verdicts wait from now on."""
        leave(batch, verdicts, tapped, self._rows)

    def waiting(
        self, words: torch.Tensor, page_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, RoundRows, torch.Tensor]:
        """words int32 [2, J]: slots, and of each whether rows may wait (0: it is padding). None does then.

        Gives [J * RING_ROWS, width], the tokens of these rows, and the draft head's rows for them, of which
        each one's token is the next in the text; rows beyond those that wait are empty. And how many wait of
        each: int32 [J].
        """
        tables, whose = self._tables, words[0].long()
        since, length = tables.waits[whose], tables.length[whose]
        counts = torch.where((words[1] > 0) & (since >= 0), length - since, 0).clamp(max=RING_ROWS)
        starts = length - counts
        tables.waits.index_fill_(0, whose, -1)
        inside = torch.arange(RING_ROWS, dtype=torch.int32, device=words.device)
        positions = starts[:, None] + inside
        real = inside < counts[:, None]
        real &= positions + 1 < tables.text.shape[1]
        safe = positions.clamp(0, tables.text.shape[1] - 2).long()
        own, tokens = (tables.text[whose[:, None], safe + by] for by in (0, 1))
        kv_rows = tables.pages[whose[:, None], safe // page_size] * page_size + safe.int() % page_size
        rows = RoundRows(
            torch.where(real, tokens, 0).view(-1),
            torch.where(real, positions, 0).view(-1),
            torch.where(real, kv_rows, -1).view(-1),
            starts,
        )
        tapped = self._rows[whose[:, None], safe % RING_ROWS]
        return tapped.view(real.numel(), tapped.shape[-1]), own.reshape(-1), rows, counts


class DeviceWindows:
    """`rows` [slots, kept, width]: that of position p in place p mod kept. `path`: rows that a step can make
    certain, which those behind a whole window may be ahead of its reader.
    """

    def __init__(self, slots: int, path: int, width: int, dtype: torch.dtype, device: str) -> None:
        self.rows = torch.zeros(slots, ROWS + 4 * path, width, dtype=dtype, device=device)

    @torch.inference_mode()
    def read(self, slot: int, rows: range) -> torch.Tensor:
        """Float32 [len(rows), width], of those positions. Waits for all steps that were launched."""
        places = torch.arange(rows.start, rows.stop) % self.rows.shape[1]
        return self.rows[slot].index_select(0, places.to(self.rows.device)).float().cpu()
