"""Who computes the rows of a step: one process for all of them.

The plain runner asks a `Forward`; `eyas.engine.loop.attention_ranks` is another one.
"""

from __future__ import annotations

from typing import Protocol

import torch

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch, build_batch
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import DecoderModel
from eyas.engine.parallel.step_calls import StepRows


class Forward(Protocol):
    """The rows of one step through all layers, once for each step."""

    def __call__(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """As `DecoderModel.forward`: [R, hidden], and [R, len(taps) * hidden]; their KV is written."""

    def close(self) -> bool:
        """After the last step. False: what it holds is lost, so nothing was waited for."""


class Alone:
    """One model over one pool."""

    def __init__(self, model: DecoderModel[ForwardBatch], pool: KvPool, backend: AttentionBackend) -> None:
        self._model = model
        self._pool = pool
        self._backend = backend

    def __call__(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor]:
        """R rows -> [R, hidden], and [R, len(taps) * hidden]."""
        batch = build_batch(rows.spans, rows.tokens, self._pool.page_size, self._backend)
        return self._model.forward(batch, self._pool, rows.taps)

    def close(self) -> bool:
        """True, and nothing else: it owns no thread and no memory."""
        return True
