"""Prompt attention over pages that are read into one place: against plain torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eyas.engine.attention import side_by_side
from eyas.engine.attention.side_by_side import MOST_BYTES, SideBySideAttention
from eyas.engine.kernels.attention.side_by_side import attend_side_by_side
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape
from tests.unit.prompt_attention import DIM, HEADS, KV, PAGE, SCALE, Rig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERRORS = {torch.float32: 1e-5, torch.float16: 0.004}
SPANS = [(64, 22), (0, 130), (192, 5)]
"""Rows before a chunk and in it: less than a tile and more; blocks of keys that are whole, and not."""


def attention(rig: Rig) -> SideBySideAttention:
    shape = PoolShape(KvFormat(2, KV, DIM), len(rig.layer), PAGE, rig.layer.dtype, DEVICE)
    return SideBySideAttention(shape, SCALE)


def made(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(side_by_side, "FEWEST", 5)
    planned = attention(rig)
    assert planned.ready() and planned.plan(rig.spans)
    out = torch.full((len(rig.q) + 3, HEADS, DIM), 9.0, dtype=rig.q.dtype, device=DEVICE)
    planned.run(rig.q, rig.layer, out)
    assert (out[len(rig.q) :] == 9.0).all()
    return out[: len(rig.q)].cpu().float()


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_chunks_see_their_sequences_rows_up_to_their_own(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(SPANS, DEVICE, dtype)
    expected = rig.expected()
    assert (made(rig, monkeypatch) - expected).abs().max() < ERRORS[dtype]
    rig.spans[0] = dataclasses.replace(rig.spans[0], start=0)
    assert (made(rig, monkeypatch) - expected).abs().max() > 0.1


def test_the_end_of_a_chunk_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tile behind its chunk's last one are not written."""
    rig = Rig([(64, 70)], DEVICE)
    keys, values = rig.keys[0].to(DEVICE)
    out = torch.full((200, HEADS, DIM), 9.0, device=DEVICE)
    attend_side_by_side(rig.q, keys, values, SCALE, out[:70])
    assert (out[:70].cpu() - rig.expected()).abs().max() < 1e-5 and (out[70:] == 9.0).all()


def test_what_is_left_to_the_kernel_over_pages() -> None:
    rig = Rig([(8, 16)], DEVICE)
    planned = attention(rig)
    assert not planned.plan(rig.spans) and not planned.made_up(100)
    [long] = planned.made_up(2000)
    assert planned.plan([long]) and not planned.plan([long, *rig.spans])
    assert not planned.plan([dataclasses.replace(long, start=16)])
    rows = MOST_BYTES // (2 * KV * DIM * 4)
    start, pages = (rows - 2000) // 64 * 64, [0] * (rows // PAGE + 1)
    assert planned.plan([dataclasses.replace(long, start=start, pages=pages)])
    assert not planned.plan([dataclasses.replace(long, start=start + 64, pages=pages)])


@pytest.mark.parametrize(
    ("dtype", "dim", "takes"),
    [(torch.bfloat16, 128, True), (torch.float32, 128, False), (torch.bfloat16, 64, False)],
)
def test_heads_that_were_measured(dtype: torch.dtype, dim: int, takes: bool) -> None:
    assert SideBySideAttention.takes(PoolShape(KvFormat(1, 1, dim), 1, PAGE, dtype, "meta")) == takes
