"""Prompt chunks in the expanded form of latent attention: the absorbed form's results, and when it pays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from eyas.engine.attention import latent_prompts
from eyas.engine.attention.latent import PagedLatents
from eyas.engine.attention.latent_heads import LatentHeads
from eyas.engine.attention.latent_prompts import ExpandedPrompts
from eyas.engine.attention.rows import RowLimits
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import LatentSpec
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.kernels.latent.latent_tiles import latent_tile_rows
from eyas.engine.kernels.products.skinny import RotaryInput
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape

HEADS, LATENT, ROTATED, PLAIN, VALUE, PAGE, PAGES = 3, 32, 16, 24, 20, 16, 64
SPEC = LatentSpec(
    num_heads=HEADS,
    num_kv_heads=1,
    head_dim=LATENT + ROTATED,
    rope=RopeConfig(),
    scale=0.2,
    kv_rank=LATENT,
    query_rank=0,
    plain_dim=PLAIN,
    value_dim=VALUE,
)
WHOLE = dataclasses.replace(SPEC, head_dim=LATENT + 32, plain_dim=32, value_dim=16)
"""Sides that are powers of two: blocks of keys come by the tensor memory accelerator."""
SHAPE = PoolShape(KvFormat(1, 1, LATENT + ROTATED, LATENT), PAGES, PAGE)
CHUNKS = ((0, 150), (37, 20), (130, 140), (5, 1))
"""Rows before a chunk and in it: tiles of 128 that are whole, and that are not."""


class Scene:
    """A round of two sequences, then chunks, over latents; rows that nothing wrote are NaN."""

    def __init__(self, spec: LatentSpec = SPEC) -> None:
        torch.set_num_threads(1)  # many test processes share the cores
        rotated, plain = spec.head_dim - LATENT, spec.plain_dim
        self.spec, self.shape = spec, PoolShape(KvFormat(1, 1, spec.head_dim, LATENT), PAGES, PAGE)
        self.random = torch.Generator().manual_seed(3)
        self.layer = torch.full((PAGES, 1, PAGE, 1, spec.head_dim), float("nan"))
        self.layer[0] = 0.0
        self.tables = torch.zeros(7, 40, dtype=torch.int32)
        free = (torch.randperm(PAGES - 1, generator=self.random) + 1).tolist()
        self.spans, tiles, first, most = [], [], 0, latent_tile_rows(HEADS)
        for slot, (start, count) in enumerate(((20, 1), (33, 1), *CHUNKS)):
            pages, free = free[: -(-(start + count) // PAGE)], free[-(-(start + count) // PAGE) :]
            self.tables[slot, : len(pages)] = torch.tensor(pages)
            for row in range(start + count):
                self.layer[pages[row // PAGE], 0, row % PAGE, 0] = self.normal(spec.head_dim)
            if slot > 1:
                self.spans.append(QuerySpan(pages, start, count))
                tiles += [(slot, first + i, start + i, min(most, count - i)) for i in range(0, count, most)]
                first += count
        rounds = DecodeRows(int32(0, 1), int32(20, 33))
        positions = [20, 33] + [s.start + i for s in self.spans for i in range(s.count)]
        kept = torch.full((len(positions),), -1, dtype=torch.int32)
        self.rows = ForwardRows(kept, int32(*positions), kept, rounds, torch.tensor(tiles, dtype=torch.int32))
        angles = torch.outer(torch.arange(300.0), 0.4 ** torch.arange(rotated // 2))
        rotation = RotaryInput(angles.cos(), angles.sin(), self.rows.positions)
        keys, values = (self.normal(HEADS, size, LATENT) for size in (plain, spec.value_dim))
        self.heads = LatentHeads(spec.scale, rotation=rotation, keys=keys, values=values)
        self.q = self.normal(len(positions), HEADS * (plain + rotated) + 5)[:, :-5]

    def normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self.random)

    def attended(self, prompts: ExpandedPrompts | None = None, **rows: Any) -> torch.Tensor:
        attention = PagedLatents(self.tables, HEADS, self.shape, RowLimits(2, 1), pdl=False, prompts=prompts)
        return attention(self.q, self.layer, dataclasses.replace(self.rows, **rows), self.heads)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def planned(
    spans: list[QuerySpan], monkeypatch: pytest.MonkeyPatch, spec: LatentSpec = SPEC
) -> ExpandedPrompts:
    """Whether it pays or not."""
    monkeypatch.setattr(ExpandedPrompts, "pays", lambda self, spans: True)
    prompts = ExpandedPrompts(spec, dataclasses.replace(SHAPE, format=KvFormat(1, 1, spec.head_dim, LATENT)))
    assert prompts.plan(spans)
    return prompts


@pytest.mark.parametrize("spec", [SPEC, WHOLE])
def test_it_is_the_absorbed_form(monkeypatch: pytest.MonkeyPatch, spec: LatentSpec) -> None:
    """Beside rounds, whose rows go their own way."""
    scene = Scene(spec)
    absorbed = scene.attended()
    expanded = scene.attended(planned(scene.spans, monkeypatch, spec), planned=True)
    assert absorbed.isfinite().all() and (expanded - absorbed).abs().max() < 2e-4
    assert torch.equal(expanded[:2], absorbed[:2])
    again = scene.attended(planned(scene.spans, monkeypatch, spec), planned=False)
    assert torch.equal(again, absorbed), "what was not planned is not expanded"
    if spec is WHOLE:  # rows behind the planned ones are zeros; and a mutation is seen
        fewer = scene.attended(planned(scene.spans[:-1], monkeypatch, spec), planned=True)
        assert torch.equal(fewer[:-1], expanded[:-1]) and not fewer[-1].any()
        scene.layer[scene.spans[1].pages[0], 0, 3] += 1.0  # a row of a whole block
        assert (
            scene.attended(planned(scene.spans, monkeypatch, spec), planned=True) - absorbed
        ).abs().max() > 1e-2


@pytest.mark.slow
def test_a_wrong_page_a_wrong_start_and_a_wrong_turn_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    right = scene.attended()
    swapped = [dataclasses.replace(s, pages=[*s.pages[:-2], *s.pages[-2:][::-1]]) for s in scene.spans[:1]]
    late = [dataclasses.replace(s, start=s.start - 1) for s in scene.spans[1:2]]
    for wrong in ([*swapped, *scene.spans[1:]], [scene.spans[0], *late, *scene.spans[2:]]):
        found = scene.attended(planned(wrong, monkeypatch), planned=True)
        assert not ((found - right).abs().max() < 1e-2)
    scene.heads.rotation.positions[2:].add_(1)
    found = scene.attended(planned(scene.spans, monkeypatch), planned=True)
    assert (found - right).abs().max() > 1e-2


def test_a_graph_reads_where_its_chunks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As planned, with room that is left over; then other chunks by the same launches, and none beyond it."""
    scene, few = Scene(WHOLE), 3
    expected = scene.attended(planned(scene.spans, monkeypatch, WHOLE), planned=True)
    prompts = ExpandedPrompts(WHOLE, scene.shape)
    monkeypatch.setattr(latent_prompts, "REACH", 600)
    room = prompts.room(scene.rows.tokens.shape[0] + 200, len(scene.spans) + few)
    blank = scene.attended(prompts, planned=True)
    assert not blank[2:].any() and torch.equal(blank[:2], expected[:2])
    assert room.fill(scene.spans)
    assert torch.equal(scene.attended(prompts, planned=True), expected)
    assert room.fill(scene.spans[:-1])
    fewer = scene.attended(prompts, planned=True)
    assert torch.equal(fewer[:-1], expected[:-1]) and not fewer[-1].any()
    assert not room.fill([]) and not room.fill([QuerySpan([0] * 80, 1000, 9)])
    assert torch.equal(scene.attended(prompts, planned=True), fewer), "what is refused changes nothing"


def test_when_it_pays() -> None:
    """V3's sizes: 341 tokens of a new prompt, or 171 behind many cached ones, if there is room."""
    v3 = dataclasses.replace(
        SPEC, num_heads=16, head_dim=576, kv_rank=512, plain_dim=128, value_dim=128, query_rank=1536
    )
    prompts = ExpandedPrompts(v3, dataclasses.replace(SHAPE, dtype=torch.bfloat16))

    def pays(start: int, count: int) -> bool:
        return prompts.pays([QuerySpan([], start, count)])

    assert pays(0, 345) and not pays(0, 335)
    assert pays(30_000, 175) and not pays(30_000, 165)
    most = latent_prompts.MOST_BYTES // (16 * 256 * 2)
    assert pays(most - 2000, 2000) and not pays(most - 2000, 2001)
    assert not prompts.plan([]) and not prompts.plan([QuerySpan([0] * 30, 0, 40)])
