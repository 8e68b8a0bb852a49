"""Chunks start before rounds, and rounds beside them wait for the whole kernel before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eyas.engine.attention import exact_rows, rows
from eyas.engine.attention.exact_rows import ExactAttention
from eyas.engine.attention.rows import PagedAttention, RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.products.skinny import MAX_ROWS
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape


@pytest.mark.parametrize(("chunk", "late"), [(MAX_ROWS - 3, False), (MAX_ROWS - 2, True)])
@pytest.mark.parametrize(
    ("kind", "module", "names"),
    [
        (PagedAttention, rows, ("attend_chunks", "attend")),
        (ExactAttention, exact_rows, ("attend_chunks_exactly", "attend_exactly")),
    ],
)
def test_chunks_start_first(
    kind: Any, module: Any, names: tuple[str, str], chunk: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, names[0], lambda *_, **__: seen.append("chunks"))
    monkeypatch.setattr(module, names[1], lambda q, kv, queries, launch, **_: seen.append(launch.pdl))
    shape = PoolShape(KvFormat(1, 1, 32), 4, 16, torch.float32, "cpu")
    table = torch.zeros(1, 4, dtype=torch.int32)
    none, two = torch.zeros(2 + chunk, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    step = ForwardRows(none, none, none, DecodeRows(two, two), torch.zeros(1, 4, dtype=torch.int32))
    attention = kind(table, 2, shape, RowLimits(2, 1), pdl=True)
    attention(torch.zeros(2 + chunk, 2, 32), torch.zeros(4, 2, 16, 1, 32), step, ScoreScaling(1.0))
    assert seen == ["chunks", not late]
