"""The newest features of every running sequence, kept on the device: a drafter elsewhere begins with them.

The step that makes rows certain writes them (`eyas.engine.kernels.exchange.row_ring`). The host reads them
only where such a drafter has to begin anew, or cannot take a row from GPU to GPU.
"""

from __future__ import annotations

import torch

from eyas.engine.batch.window import ROWS


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
