"""Pages of keys and values for prompt attention, and plain attention over them."""

from __future__ import annotations

import torch

from eyas.engine.attention.cudnn_backend import CudnnAttention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape

PAGE, HEADS, KV, DIM, UNIT = 4, 4, 2, 64, 8
SCALE = 0.2
SHAPES: list[tuple[int, int, bool]] = []


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Dense` in plain torch, for shapes that cuDNN has plans for."""
    SHAPES.append((len(q), len(k), causal))
    assert len(q) % UNIT == len(k) % UNIT == 0
    assert len(q) == len(k) if causal else len(k) & (len(k) - 1) == 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        scores.masked_fill_(torch.ones(len(q), len(k)).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


class Rig:
    """Sequences on scattered pages of one layer of two; what they have not is NaN."""

    def __init__(
        self, spans: list[tuple[int, int]], device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        dice = torch.Generator().manual_seed(7)
        counts = [-(-(start + count) // PAGE) for start, count in spans]
        pool = torch.full((1 + sum(counts), 2, 2, PAGE, KV, DIM), float("nan"))
        free = (torch.randperm(sum(counts), generator=dice) + 1).tolist()
        self.spans, self.keys = [], []
        for (start, count), pages in zip(spans, counts, strict=True):
            table, free = free[:pages], free[pages:]
            rows = torch.randn(2, start + count, KV, DIM, generator=dice).to(dtype).float()
            for row in range(start + count):
                pool[table[row // PAGE], 1, :, row % PAGE] = rows[:, row]
            self.spans.append(QuerySpan((*table, 0, 0), start, count))
            self.keys.append(rows)
        self.layer = pool.to(device, dtype)[:, 1]
        made = torch.randn(sum(c for _, c in spans), HEADS + 2 * KV, DIM, generator=dice)
        self.q = made.to(device, dtype)[:, :HEADS]

    def made(self) -> torch.Tensor:
        shape = PoolShape(KvFormat(2, KV, DIM), len(self.layer), PAGE)
        attention = CudnnAttention(shape, SCALE, plain)
        assert attention.ready() and attention.plan(self.spans)
        out = torch.full((len(self.q) + 3, HEADS, DIM), 9.0)
        attention.run(self.q, self.layer, out)
        assert (out[len(self.q) :] == 9.0).all()
        return out[: len(self.q)]

    def expected(self) -> torch.Tensor:
        parts, row = [], 0
        for span, (keys, values) in zip(self.spans, self.keys, strict=True):
            q = self.q[row : row + span.count].cpu().float()
            k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
            hidden = torch.ones(scores.shape[1:]).triu(1 + span.start).bool()
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
            row += span.count
        return torch.cat(parts)
