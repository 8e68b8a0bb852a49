"""A CPU: what stands beside a model's layers in plain torch, for rows whose bits are their own affair."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch
from eyas.engine.attention.soft_cap import soft_cap
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import WeightSource
from eyas.engine.kernels.products.skinny_tiles import Table
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.linear import Linear, LinearLoader, pad_rows
from eyas.engine.layers.norm import rms_norm
from eyas.engine.layers.rotary import Rotary
from eyas.engine.models.layer import DecoderLayer
from eyas.engine.models.ops.machine import Machine
from eyas.engine.models.ops.parts import JoinPart
from eyas.engine.models.ops.torch_ops import Step, TorchOps, made_by_experts
from eyas.engine.parallel.expert_ranks import ExpertRanks


class TorchMachine(Machine[Linear]):
    """Weights of all formats are widened as they are read; a router's are float32.

    `ranks`: over which experts are spread, whole; None: all are here.
    """

    groups_experts = False

    def __init__(
        self, config: ModelConfig, backend: AttentionBackend, ranks: ExpertRanks | None = None
    ) -> None:
        """`config`: of the decoder whose layers run here."""
        self.backend, self.ranks = backend, ranks
        dims = {layer.attention.rope: layer.attention.rotated_dim for layer in config.layers}
        length = config.context_length
        self._rotaries = {rope: Rotary(rope, dim, length, backend.device) for rope, dim in dims.items()}

    def loader(self, weights: WeightSource, names: list[str]) -> LinearLoader:
        return LinearLoader.of(weights, names)

    def router(self, weights: WeightSource, name: str, shape: tuple[int, int]) -> tuple[Linear, Table]:
        return Linear(weights.take(name, shape, torch.float32)), {}

    def own_experts(self, weights: WeightSource, experts: int) -> range:
        return range(experts) if self.ranks is None else self.ranks.own

    def matrix(self, rows: torch.Tensor) -> Linear:
        return Linear(rows)

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def some_rows(self, matrix: Linear, ids: tuple[int, ...]) -> Linear:
        return matrix.in_order(torch.tensor(ids))

    def joining(self, stored: torch.Tensor, part: JoinPart) -> Linear:
        return Linear(stored)

    def most_rows(self, layers: Sequence[DecoderLayer[Linear]]) -> int:
        return 0

    def ops(
        self, rows: ForwardBatch, pool: KvPool, eps: float, few_rows: int = 0, *, whole: bool = True
    ) -> TorchOps:
        return TorchOps(Step.of(rows, pool, self._rotaries, self.backend), eps, self.ranks)

    def bounded(self, rows: ForwardBatch, unseen: int) -> ForwardBatch:
        """The same: a specification says so to the attention."""
        return rows

    def join(
        self, features: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, part: JoinPart
    ) -> torch.Tensor:
        """Padded to whole blocks."""
        embedded, features = F.embedding(pad_rows(tokens), part.embedding), pad_rows(features)
        if part.blank is not None:
            embedded = embedded.masked_fill((pad_rows(positions) <= part.blank)[:, None], 0.0)
        if part.gains is not None:
            pairs = zip((embedded, features), part.gains, strict=True)
            embedded, features = (rms_norm(x, gain, part.eps) for x, gain in pairs)
        halves = (features, embedded) if part.feature_first else (embedded, features)
        return torch.cat(halves, dim=-1)

    def norm(self, x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, gain, eps)

    def norms(self, x: torch.Tensor, gains: Sequence[torch.Tensor], eps: float) -> torch.Tensor:
        pairs = zip(x.chunk(len(gains), dim=-1), gains, strict=True)
        return torch.cat([rms_norm(part, gain, eps) for part, gain in pairs], dim=-1)

    def product(self, x: torch.Tensor, matrix: Linear, bias: torch.Tensor | None = None) -> torch.Tensor:
        return matrix(x, bias)

    def picked(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x[rows]

    def logits(self, x: torch.Tensor, head: Linear, out: torch.Tensor | None = None) -> torch.Tensor:
        made = head(x).float()
        return made if out is None else out.copy_(made)

    def capped(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        return soft_cap(logits, cap)

    def newest(self, rows: ForwardBatch, pool: KvPool, stages: int, width: int) -> PagedRows:
        return PagedRows(rows.spans, pool, stages, width)

    @torch.inference_mode()
    def serve_others(self, layers: Sequence[DecoderLayer[Linear]], nothing: torch.Tensor) -> None:
        """A step without rows on this rank: layer by layer its experts take the rows of the other ranks.

        `nothing`: rows [0, hidden].
        """
        for part in (layer.experts for layer in layers):
            if part is not None and self.ranks is not None:
                chosen = torch.empty(0, part.per_row, dtype=torch.int64, device=nothing.device)
                made_by_experts(nothing, chosen, part, self.ranks)


class PagedRows:
    """The `NewestRows` of one forward of certain rows."""

    def __init__(self, spans: Sequence[QuerySpan], pool: KvPool, stages: int, width: int) -> None:
        """`spans`: of the forward, one after the other."""
        self._pages = pool.behind(stages + 1, stages, width)
        size, row = pool.page_size, 0
        # Rows whose row before is no row here, and its page (-1: none); each page's last row, and the page.
        self._firsts: list[tuple[int, int]] = []
        self._ends: list[tuple[int, int]] = []
        for span in spans:
            before, end = span.start - 1, span.start + span.count
            self._firsts.append((row, span.pages[before // size] if span.start else -1))
            for last in [*range(span.start // size * size + size, end, size), end]:
                self._ends.append((row + last - 1 - span.start, span.pages[(last - 1) // size]))
            row += span.count

    def before(self, gave: torch.Tensor, stage: int) -> torch.Tensor:
        """The results of the row before each row."""
        earlier = gave.roll(1, 0)
        for row, page in self._firsts:
            earlier[row] = self._pages[page, stage] if page >= 0 else 0.0
        return earlier

    def keep(self, gave: torch.Tensor) -> None:
        """Writes what the last row in each page gave."""
        for row, page in self._ends:
            self._pages[page] = gave[row]
