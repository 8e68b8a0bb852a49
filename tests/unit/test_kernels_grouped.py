"""Products over groups of rows, also in FP8, against plain torch; planted faults are caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from eyas.engine.checkpoint.fp8 import RowRounding
from eyas.engine.kernels.experts import grouped
from eyas.engine.kernels.experts.group import group
from eyas.engine.kernels.experts.grouped_task import GateActivation, shape_of
from eyas.engine.kernels.experts.grouped_tiles import GroupedTile, steps_together, tile_for
from eyas.engine.kernels.products.blocks import StoredWeight, quantise
from tests.unit.crossed import crossed
from tests.unit.grouped_products import (
    COMPILED,
    DEVICE,
    act,
    as_blocks,
    as_channels,
    close,
    computed,
    in_kind,
    meant,
    products,
    random,
    rounded,
)

EXPERTS, PER_ROW, HIDDEN, WIDTH = 6, 2, 384, 128
SIZES = (1, 3, 17, 75)


def experts_of(rows: int) -> torch.Tensor:
    """Of some rows, two experts each; expert 1 is nowhere."""
    scores = random(rows, EXPERTS, seed=rows)
    scores[:, 1] = -9.0
    return scores.topk(PER_ROW).indices.int().to(DEVICE)


def layers(kind: str) -> tuple[StoredWeight, StoredWeight]:
    gate_up = random(EXPERTS, 2 * WIDTH, HIDDEN, seed=1) / HIDDEN**0.5
    down = random(EXPERTS, HIDDEN, WIDTH, seed=2) / WIDTH**0.5
    return in_kind(gate_up, kind), in_kind(down, kind)


def run(
    x: torch.Tensor, experts: torch.Tensor, weights: tuple[StoredWeight, StoredWeight]
) -> list[torch.Tensor]:
    shared = products()
    order = shared.group(experts, weights)
    inner = shared.gate_up(x, weights[0], order, PER_ROW, GateActivation())
    by_choice = torch.empty_like(inner)
    by_choice[order.order.long()] = inner
    return [by_choice, shared.down(inner, weights[1], order)]


@pytest.mark.parametrize(
    ("rows", "kind"),
    crossed(
        SIZES,
        ["float32", "blocks", "powers", "token", "tensor"],
        quick=lambda rows, kind: rows == 17 or kind == "blocks" and rows == 1,
    ),
)
def test_each_row_meets_its_own_experts(rows: int, kind: str) -> None:
    x, experts, weights = random(rows, HIDDEN, seed=rows + 1), experts_of(rows), layers(kind)
    found = run(x.to(DEVICE), experts, weights)
    expected = computed(x, experts, weights)
    close(found[0], expected[0], kind)
    # Rounding to FP8 may tip a number of the inner rows, whose float32 and float64 differ a little.
    error = (found[1].double().cpu() - expected[1]).norm() / expected[1].norm()
    assert error < (2e-6 if kind == "float32" else 1e-2 if COMPILED else 5e-3)
    with pytest.raises(AssertionError):  # a choice that goes to its neighbour's expert
        close(found[0], computed(x, experts.flip(1), weights)[0], kind)


def test_steps_whose_weights_are_asked_for_together_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, tile = 768, GroupedTile(16, 128, 128, warps=4, stages=5)
    x, experts = random(17, hidden, seed=3), experts_of(17)
    weight = in_kind(random(EXPERTS, 2 * WIDTH, hidden, seed=1) / hidden**0.5, "blocks")
    shape = shape_of(weight, GateActivation())
    shared = products(tile, (weight, GateActivation(), experts.numel()))
    assert steps_together(shape, tile) == 2 and steps_together(replace(shape, k=hidden + 128), tile) == 1
    order = shared.group(experts, (weight, weight))

    def gated() -> torch.Tensor:
        made = shared.gate_up(x.to(DEVICE), weight, order, PER_ROW, GateActivation())
        assert isinstance(made, torch.Tensor)
        return made

    both = gated()
    with monkeypatch.context() as patched:
        patched.setattr(grouped, "steps_together", lambda *_: 1)
        assert torch.equal(gated(), both)
    scales = weight.scales
    assert scales is not None
    scales[:, :, 1] *= 2  # of the second of two steps
    assert not torch.equal(gated(), both)


@pytest.mark.parametrize(
    ("fault", "kind"),
    crossed(
        ["a scale", "an expert's rows", "an offset"],
        ["blocks", "token"],
        quick=lambda fault, kind: (kind == "token") == (fault == "a scale"),
    ),
)
def test_a_planted_fault_is_caught(fault: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, experts, weights = random(17, HIDDEN), experts_of(17), layers(kind)
    expected = computed(x, experts, weights)[0]
    gate_up, down = weights
    assert gate_up.scales is not None
    if fault == "a scale":
        at = (1, 2) if kind == "blocks" else (1,)
        gate_up.scales[int(experts[3, 0]), *at] *= 1.25
    elif fault == "an expert's rows":
        gate_up.stored[int(experts[3, 0]), 5] = 0
    else:

        def shifted(*args: object) -> object:
            made = group(*args)  # type: ignore[arg-type]
            return replace(made, order=made.order.roll(1))

        monkeypatch.setattr(grouped, "group", shifted)
    with pytest.raises(AssertionError):
        close(run(x.to(DEVICE), experts, (gate_up, down))[0], expected, kind)


@pytest.mark.parametrize(
    ("tile", "gate", "kind"),
    crossed(
        [
            GroupedTile(16, 64, 32, 4, 3, split=3),
            GroupedTile(32, 128, 128, 4, 2),
            GroupedTile(64, 32, 64, 8, 3, group=1),
        ],
        [None, GateActivation(), GateActivation(gelu=True)],
        ["float32", "blocks", "token", "tensor"],
        quick=lambda tile, gate, kind: (
            kind == "blocks" and (tile.split == 3 or gate is None) or gate is None and tile.rows == 32
        ),
    ),
)
def test_dense_products_however_they_are_cut(
    tile: GroupedTile, gate: GateActivation | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "programs", lambda tile, shape: 3)  # some have two tiles
    plain = random(256, HIDDEN, seed=4)
    weight = in_kind(plain, kind)
    shared = products(tile, (weight, gate, 70))
    x = random(70, HIDDEN, seed=5)
    expected = rounded(x, weight) @ meant(weight).t()
    for _ in range(2):  # tickets are left as they were found
        read = x.to(DEVICE)
        found = shared.dense(read, weight) if gate is None else shared.dense_gated(read, weight, gate)
        close(found, expected if gate is None else act(expected, gate.gelu), kind)
    assert not shared.launch.tickets.any()


@pytest.mark.parametrize("kind", ["float32", "blocks", "token", "tensor"])
@pytest.mark.parametrize("rows", [5, 80])
def test_sides_that_are_no_multiple_of_a_block(kind: str, rows: int) -> None:
    """As of DeepSeek's kv_a_proj, and of small models."""
    plain = random(160, 192, seed=6)
    weight = in_kind(plain, kind)
    x = random(rows, 192, seed=7)
    close(products().dense(x.to(DEVICE), weight), rounded(x, weight) @ meant(weight).t(), kind)


@pytest.mark.parametrize("powers", [False, True])
def test_rows_are_rounded_by_the_rule(powers: bool) -> None:
    """To the bit; rows of zeros and of tiny numbers too."""
    x = random(5, 300, seed=8) * torch.tensor([1e-3, 1.0, 0.0, 1e-6, 300.0])[:, None]
    found = quantise(x.to(DEVICE), RowRounding("block", powers))
    wide = found.stored.cpu().float() * found.scales.cpu().repeat_interleave(128, 1)[:, :300]
    assert torch.equal(wide.double(), rounded(x, as_blocks(random(16, 300), powers)))
    if powers:
        assert torch.equal(found.scales.cpu().log2() % 1, torch.zeros(5, 3))


@pytest.mark.parametrize("rows", ["token", "tensor"])
@pytest.mark.parametrize("width", [300, 5000])
def test_rows_of_one_scale_are_rounded_by_the_rule(rows: Any, width: int) -> None:
    """To the bit; zeros, numbers beyond a stored scale, and what is no number too."""
    x = random(6, width, seed=8) * torch.tensor([1e-3, 1.0, 0.0, 1e-6, 3e4, 1.0])[:, None]
    x[1, 7], rounding = float("nan"), RowRounding(rows, scale=0.02)
    found = quantise(x.to(DEVICE), rounding)
    assert found.scales.shape == (6,)
    wide = found.stored.cpu().float() * found.scales.cpu()[:, None]
    others = [0, 2, 3, 4, 5]
    assert torch.equal(wide[others], rounding.rounded(x)[others])
    assert wide[1].isnan().nonzero().tolist() == [[7]]
    assert torch.equal(wide[others].double(), rounded(x, as_channels(random(16, width), rounding))[others])


def test_a_row_without_numbers_spoils_no_other() -> None:
    x, weight = random(5, HIDDEN, seed=9), as_channels(random(48, HIDDEN, seed=10), RowRounding("token"))
    alone = products().dense(x.to(DEVICE), weight)
    x[2, 3] = float("nan")
    found = products().dense(x.to(DEVICE), weight)
    others = [0, 1, 3, 4]
    assert found[2].isnan().all() and torch.equal(found[others], alone[others])


def test_tiles_fit_scratch_memory_and_shape() -> None:
    deep = shape_of(StoredWeight(torch.empty(256, 512, 7168, device="meta")), GateActivation())
    for choices in (8, 64, 256, 4096, 32768):
        tile = tile_for(deep, choices, {})
        assert deep.k % (tile.split * tile.depth) == 0
    with pytest.raises(ValueError, match="multiple of 16"):
        tile_for(replace(deep, k=100), 8, {})
