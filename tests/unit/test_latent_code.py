"""Every kernel of latent attention compiles for Hopper and fits a multiprocessor. Nothing runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.attention.attend import QueryRows
from eyas.engine.kernels.attention.paged import PagedKv
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kernels.latent import latent_products, latent_rows
from eyas.engine.kernels.latent.latent_attend import LatentScratch, attend_latent_chunks, attend_latents
from eyas.engine.kernels.latent.latent_prefill import ExpandedRows, attend_expanded
from eyas.engine.kernels.launch.warm import KernelWarmup
from eyas.engine.kernels.products.skinny import KvRows, RotaryInput

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LATENT, ROTATED, PLAIN, VALUE = 512, 64, 128, 128
SHARED_BYTES = 227 * 1024
CASES = ((16, 1, 1), (16, 8, 1), (16, 8, 2), (16, 4, 4), (16, 8, 66), (128, 8, 1))
"""Heads of a rank, sequences, rows of each; those of several rows also as trees."""


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def int32(*sizes: int) -> torch.Tensor:
    return empty(*sizes, dtype=torch.int32)


def paged(dtype: torch.dtype = torch.bfloat16) -> PagedKv:
    """One of three layers."""
    pool = empty(64, 3, 1, 16, 1, LATENT + ROTATED, dtype=dtype)[:, 1]
    return PagedKv(pool, int32(9, 64), ScoreScaling(0.1))


def attention() -> None:
    every_attention(paged())


def fp8() -> None:
    """Over a pool in FP8, and what it keeps."""
    kv = paged(torch.float8_e4m3fn)
    every_attention(kv)
    angles = empty(8, ROTATED // 2, dtype=torch.float32)
    norms, rotation = latent_rows.InnerNorms(empty(LATENT), None, 1e-6), RotaryInput(angles, angles, int32(3))
    latent_rows.write_latents(
        empty(3, 3072 + LATENT + ROTATED), norms, rotation, KvRows(kv.pool, int32(3)), True
    )


def every_attention(kv: PagedKv) -> None:
    for heads, batch, width in CASES:
        q, slots = empty(batch * width, heads, LATENT + ROTATED), int32(batch)
        masks = [None] if width == 1 else [None, empty(-(-width // 64), batch, width, dtype=torch.int64)]
        scratch = LatentScratch.on(q, LATENT, heads, (batch, width), pdl=True)
        for mask in masks:
            parted = attend_latents(q, kv, QueryRows(slots, slots, width, mask), LATENT, scratch)
        factor, out = empty(heads, VALUE, LATENT), empty(batch * width, heads * VALUE)
        latent_products.values(parted, factor, out, pdl=True)
    for heads in (16, 128):
        mixed = attend_latent_chunks(empty(256, heads, LATENT + ROTATED), kv, int32(64, 4), LATENT)
        latent_products.values(mixed, empty(heads, VALUE, LATENT), empty(256, heads * VALUE), pdl=True)
    angles, made = empty(8, ROTATED // 2, dtype=torch.float32), empty(512, 16, 128)
    expanded = ExpandedRows(made, made, empty(512, LATENT + ROTATED))
    rotation, q = RotaryInput(angles, angles, int32(256)), empty(256, 16 * (PLAIN + ROTATED))
    attend_expanded(q, expanded, int32(4, 4), rotation, 0.1, empty(256, 16 * VALUE))


def rows() -> None:
    for m in (1, 256):
        angles = empty(8, ROTATED // 2, dtype=torch.float32)
        rotation, kv = RotaryInput(angles, angles, int32(m)), KvRows(paged().pool, int32(m))
        for rank in (0, 1536):
            norms = latent_rows.InnerNorms(empty(LATENT), empty(rank) if rank else None, 1e-6)
            latent_rows.write_latents(empty(m, (rank or 3072) + LATENT + ROTATED), norms, rotation, kv, True)
            if rank:
                rounded = dataclasses.replace(norms, rounding=RowRounding("block", powers=True))
                latent_rows.write_latents(empty(m, rank + LATENT + ROTATED), rounded, rotation, kv, True)
        latent_products.absorb(empty(m, 16 * (PLAIN + ROTATED)), empty(16, PLAIN, LATENT), rotation, True)


@pytest.mark.parametrize(("recipe", "kernels"), [("attention", 21), ("fp8", 22), ("rows", 6)])
def test_kernels_compile(recipe: str, kernels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that what the warm-up sets is undone
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    KernelWarmup(f"tests.unit.test_latent_code:{recipe}", (), 90, processes=2).wait()
    code = {path: path.read_text() for path in tmp_path.rglob("*.ptx")}
    assert len(code) == kernels
    assert all(".local" not in text for text in code.values()), "what no register holds is slow"
    for path, text in code.items():
        assert json.loads(path.with_suffix(".json").read_text())["shared"] <= SHARED_BYTES
        assert "mma" in text or path.stem in ("_write", "_add_up", "_values_of_row")
