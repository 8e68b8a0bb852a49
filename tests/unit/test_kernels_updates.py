"""What adapters add to products, by kernels, against plain torch in float64; and rows alone as together."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from eyas.engine.kernels.products import (
    block_updates,
    exact_wide,
    few_updates,
    grouped_updates,
    skinny,
    updates,
)
from eyas.engine.kernels.products.arrival import BLANK, UpdateLaunch
from eyas.engine.kernels.products.skinny_tiles import ProductTile
from tests.unit import tensor_core

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = torch.cuda.is_available() and not triton.knobs.runtime.interpret
RANKS = (0, 16, 48, 0, 32)  # of each slot; slot 0 is none
K = 80


class Site:
    """Factors of `parts` parts of `rows` rows each, in slots of unequal ranks, one behind the other."""

    def __init__(self, dtype: torch.dtype, parts: int, rows: int) -> None:
        torch.manual_seed(3)
        self.n = parts * rows
        part_of = torch.arange(parts, dtype=torch.int32).repeat_interleave(rows)
        self.factors, blocks, places, first = [], [torch.full((16,), 99.0)], [(0, 0)], 16
        for rank in RANKS[1:]:
            down, up = torch.randn(parts, rank, K) / K**0.5, torch.randn(rank, self.n)
            down, up = down.to(dtype), up.to(dtype)
            self.factors.append((down, up))
            blocks += [down.flatten().float(), up.flatten().float()]
            places.append((first, rank))
            first += down.numel() + up.numel()
        strided = torch.full((len(RANKS), 3, 2), 77, dtype=torch.int64)
        strided[:, 1] = torch.tensor(places)
        self.numbers = updates.SiteNumbers(
            torch.cat(blocks).to(dtype).to(DEVICE),
            strided.to(DEVICE)[:, 1],
            part_of.to(DEVICE),
            parts,
            ranks=max(RANKS),
        )

    def expected(self, x: torch.Tensor, slots: list[int]) -> torch.Tensor:
        """float64 [m, n]."""
        made: torch.Tensor = torch.zeros(len(slots), self.n, dtype=torch.float64)
        for row, slot in enumerate(slots):
            if slot and RANKS[slot]:
                down, up = (factor.double() for factor in self.factors[slot - 1])
                lower = down @ x[row].double().cpu()
                made[row] = (lower[self.numbers.part_of.cpu().long()] * up.t()).sum(1)
        return made


def _slots(m: int) -> list[int]:
    return [(row * 7 + row // 3) % len(RANKS) for row in range(m)]


def _updates(site: Site, x: torch.Tensor, slots: list[int], *, exact: bool = False) -> skinny.Updates:
    """As a step makes them."""
    rows = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    if exact:
        return updates.shrunk(x, rows, site.numbers, PDL, exact)
    return skinny.adapters_of(rows).updates(x, site.numbers)


def _added(site: Site, x: torch.Tensor, slots: list[int], *, exact: bool = False) -> torch.Tensor:
    """What is added to rows of ones."""
    made = torch.ones(len(slots), site.n, dtype=torch.float32, device=DEVICE)
    _updates(site, x, slots, exact=exact).add_to(made, PDL)
    return made.cpu() - 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("m", "parts", "rows"), [(1, 3, 32), (9, 1, 48), (140, 2, 32), (140, 1, 24)])
def test_rows_get_what_their_own_adapter_adds(dtype: torch.dtype, m: int, parts: int, rows: int) -> None:
    site, x = Site(dtype, parts, rows), torch.randn(m, K).to(dtype).to(DEVICE)
    slots = [2] if m == 1 else _slots(m)
    expected = site.expected(x, slots)
    rounded = m > updates.FEW and dtype == torch.float16  # rows times lower factors, for the matrix unit
    added = _added(site, x, slots).double()
    torch.testing.assert_close(added, expected, rtol=2e-5, atol=1e-2 if rounded else 2e-5)
    assert (expected.abs().amax(1) > 0).tolist() == [RANKS[slot] > 0 for slot in slots]


def test_a_row_has_its_bits_alone() -> None:
    site, x = Site(torch.float16, 2, 32), torch.randn(140, K).half().to(DEVICE)
    slots = _slots(140)
    together = _added(site, x, slots, exact=True)
    for row in (0, 1, 2, 77, 139):
        alone = _added(site, x[row : row + 1].contiguous(), [slots[row]], exact=True)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(("m", "split"), [(20, 1), pytest.param(40, 5, marks=pytest.mark.slow)])
def test_a_row_has_its_bits_beside_any_other(monkeypatch: pytest.MonkeyPatch, m: int, split: int) -> None:
    monkeypatch.setattr(grouped_updates, "_CHUNK", 32)
    monkeypatch.setattr(grouped_updates, "_COLUMNS", 32)
    site = Site(torch.float16, 1, 64)
    x, weight = torch.randn(m, K).half().to(DEVICE), torch.zeros(site.n, K).half().to(DEVICE)
    tile = ProductTile(32, 16, 4, 2, split=split)
    tiles = {("linear", rows, site.n, K): tile for rows in (32, 64)}
    launch = replace(skinny.ProductLaunch.on(DEVICE, pdl=PDL), tiles=tiles)

    def made(slots: list[int]) -> torch.Tensor:
        out = skinny.empty_padded(m, site.n, like=x)
        end = skinny.LinearEnd(updates=_updates(site, x, slots))
        skinny.linear(skinny.SkinnyInput(x), weight, out, launch, end)
        return out.cpu()

    slots = _slots(m)
    together, expected = made(slots), site.expected(x, slots)
    torch.testing.assert_close(together.double(), expected, rtol=1e-3, atol=1e-2)
    other = made([slots[row] if row % 5 == 2 else 2 for row in range(m)])
    assert torch.equal(other[2::5], together[2::5]) and not torch.equal(other, together)
    assert not made([0] * m).any()


def test_a_row_among_many_has_its_bits_beside_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_updates, "_CHUNK", 32)
    monkeypatch.setattr(block_updates, "_PROGRAMS", 1)  # which take several blocks each
    site, m = Site(torch.float16, 2, 32), 140
    x, slots = torch.randn(m, K).half().to(DEVICE), _slots(m)
    together = _added(site, x, slots)
    other = _added(site, x, [slots[row] if row % 5 == 2 else 2 for row in range(m)])
    assert torch.equal(other[2::5], together[2::5]) and not torch.equal(other, together)
    assert not _added(site, x, [0] * m).any()


@pytest.mark.parametrize("slot", [1, 2])
def test_a_row_has_its_bits_whenever_the_kernel_beside_comes(
    monkeypatch: pytest.MonkeyPatch, slot: int
) -> None:
    """Before the product, beside it or never: then the product makes the numbers itself."""
    monkeypatch.setattr(updates, "_PIECE", 32)
    monkeypatch.setattr(skinny, "_going_first", lambda plan, _: replace(plan, first=True))
    site, x = Site(torch.float16, 1, 64), torch.randn(1, K).half().to(DEVICE)
    tiles = {("linear", 16, site.n, K): ProductTile(32, 16, 4, 2)}
    launch = replace(skinny.ProductLaunch.on(DEVICE, pdl=PDL), tiles=tiles)
    weight, made = torch.zeros(site.n, K).half().to(DEVICE), []
    beside = few_updates.FewUpdates.beside

    def before(updates: few_updates.FewUpdates, *_: object) -> UpdateLaunch:
        made = beside(updates, False, 0)  # which waits for no program
        made.launch()
        return replace(made, launch=lambda: None)

    def never(*args: Any) -> UpdateLaunch:
        return replace(beside(*args), launch=lambda: None)

    for way in (before, beside, never):
        monkeypatch.setattr(few_updates.FewUpdates, "beside", way)
        out = skinny.empty_padded(1, site.n, like=x)
        end = skinny.LinearEnd(updates=_updates(site, x, [slot]))
        skinny.linear(skinny.SkinnyInput(x), weight, out, launch, end)
        made.append(out.cpu())
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    torch.testing.assert_close(made[0].double(), site.expected(x, [slot]), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("sms", "pdl", "first"), [(132, True, True), (2, True, False), (132, False, False)])
def test_a_product_is_launched_first_where_all_of_it_has_room(sms: int, pdl: bool, first: bool) -> None:
    """Else the kernel that it looks for at its end could not begin, and each product would wait in vain."""
    tiles = {("linear", 16, 1024, K): ProductTile(64, 16, 4, 2)}
    launch = replace(skinny.ProductLaunch.on("meta", pdl=pdl), tiles=tiles, sms=sms)
    x, weight = torch.empty(1, K, device="meta").half(), torch.empty(1024, K, device="meta").half()
    plan = skinny._plan("linear", skinny.SkinnyInput(x), weight, 1024, launch)
    ready = skinny._going_first(plan, launch)
    assert ready.first == first and ready.programs_of_sm >= 1


@pytest.mark.parametrize("m", [7, 100])
def test_rows_of_one_adapter_are_groups_of_sixteen(m: int) -> None:
    slots = [3 if row % 9 else row % 4 for row in range(m)]
    rows_of = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    table = grouped_updates.AdapterGroups(rows_of).table.tolist()
    most = grouped_updates.MOST.value
    groups = []
    for group, slot in enumerate(table[1 : 1 + table[0]]):
        first = 1 + most + 16 * group
        rows = [row for row in table[first : first + 16] if row >= 0]
        assert 0 < len(rows) <= 16 and all(slots[row] == slot for row in rows)
        groups.append(rows)
    assert [rows[0] for rows in groups] == sorted(rows[0] for rows in groups)
    assert sorted(sum(groups, [])) == [row for row in range(m) if slots[row]]
    assert len(groups) == sum(-(-slots.count(slot) // 16) for slot in set(slots) - {0})


def test_a_step_has_blank_numbers_as_long_as_products_take_some() -> None:
    groups = grouped_updates.AdapterGroups(torch.zeros(3, dtype=torch.int32, device=DEVICE))
    blanks = [groups.blanks(3, 20001) for _ in range(9)]
    assert all((each == BLANK.value).all() for each in blanks)
    assert len({each.data_ptr() for each in blanks}) == 9


class Products(Site):
    """The three products of few rows, with updates and with merged weights, of a row's norm and more."""

    def __init__(self) -> None:
        super().__init__(torch.float32, 3, 64)  # two heads each of q, k and v; or gate and up, and a half
        self.weight = torch.randn(self.n, K) / K**0.5
        self.slots = [1, 2, 0, 1, 4, 3]
        self.x = torch.randn(len(self.slots), K)

    def merged(self, row: int) -> torch.Tensor:
        """The weight with the updates of a row's slot."""
        weight: torch.Tensor = self.weight.clone()
        slot = self.slots[row]
        if RANKS[slot]:
            down, up = self.factors[slot - 1]
            for part in range(3):
                own = self.numbers.part_of.cpu() == part
                weight[own] += up.t()[own] @ down[part]
        return weight.to(DEVICE)

    def launch(self, kind: str, split: int) -> skinny.ProductLaunch:
        tile = ProductTile(32, 16, 4, 2, split=split)
        return replace(skinny.ProductLaunch.on(DEVICE, pdl=PDL), tiles={(kind, 16, self.n, K): tile})

    def updates(self, x: torch.Tensor) -> skinny.Updates:
        return _updates(self, x, self.slots)

    def source(self, rows: slice = slice(None)) -> skinny.SkinnyInput:
        x = self.x[rows].to(DEVICE).contiguous()
        sums = torch.zeros(1, skinny.MAX_ROWS, device=DEVICE)
        sums[0, : len(x)] = x.square().sum(1)
        return skinny.SkinnyInput(x, sums, 1e-2)


@pytest.mark.parametrize("split", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_linear_and_gated_add_what_merged_weights_would(split: int) -> None:
    site = Products()
    source, gate_n = site.source(), site.n // 2
    made, inner = (torch.empty(len(site.slots), n, device=DEVICE) for n in (site.n, gate_n))
    added = site.updates(source.x)
    skinny.linear(
        source, site.weight.to(DEVICE), made, site.launch("linear", split), skinny.LinearEnd(updates=added)
    )
    skinny.gated(source, site.weight.to(DEVICE), inner, site.launch("gated", split), updates=added)
    for row in range(len(site.slots)):
        one, like = site.source(slice(row, row + 1)), made[:1].clone()
        skinny.linear(one, site.merged(row), like, site.launch("linear", split))
        torch.testing.assert_close(made[row : row + 1], like, rtol=2e-5, atol=2e-5)
        like = inner[:1].clone()
        skinny.gated(one, site.merged(row), like, site.launch("gated", split))
        torch.testing.assert_close(inner[row : row + 1], like, rtol=2e-5, atol=2e-5)


def test_q_k_and_v_are_rotated_with_what_is_added() -> None:
    site, dim, rows = Products(), 32, len(Products().slots)
    angles = torch.randn(64, dim // 2)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    places = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    rotation = skinny.RotaryInput(cos, sin, places + 5)

    def run(
        source: skinny.SkinnyInput, weights: skinny.QkvWeights, first: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, pool = torch.zeros(count, 2, dim, device=DEVICE), torch.zeros(1, 2, 16, 2, dim, device=DEVICE)
        own = replace(rotation, positions=rotation.positions[first : first + count].contiguous())
        kv = skinny.KvRows(pool, places[first : first + count].contiguous())
        skinny.qkv_rope(source, weights, q, own, kv, site.launch("qkv", 1))
        return q, pool

    source = site.source()
    weights = skinny.QkvWeights(site.weight.to(DEVICE), updates=site.updates(source.x))
    q, pool = run(source, weights, 0, rows)
    for row in range(rows):
        alone, stored = run(site.source(slice(row, row + 1)), skinny.QkvWeights(site.merged(row)), row, 1)
        torch.testing.assert_close(q[row], alone[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(pool[0, :, row], stored[0, :, row], rtol=2e-5, atol=2e-5)


def test_exact_products_of_few_rows_have_the_bits_of_many() -> None:
    site, m = Site(torch.float16, 1, 64), 140
    weight, x = torch.randn(64, K).half().to(DEVICE) / K**0.5, torch.randn(m, K).half().to(DEVICE)
    launch, slots = skinny.ProductLaunch.on(DEVICE, pdl=PDL, exact=True), torch.tensor(_slots(m)).int()
    with contextlib.nullcontext() if DEVICE == "cuda" else tensor_core.hopper():
        many = exact_wide.product(x, weight, launch)
        updates.shrunk(x, slots.to(DEVICE), site.numbers, PDL, exact=True).add_to(many, PDL)
        for first, count in ((0, 1), (3, 14)):
            own = slice(first, first + count)
            added = updates.shrunk(x[own].contiguous(), slots[own].to(DEVICE), site.numbers, PDL, exact=True)
            few = torch.empty(count, 64, dtype=torch.float16, device=DEVICE)
            source = skinny.SkinnyInput(x[own].contiguous())
            skinny.linear(source, weight, few, launch, skinny.LinearEnd(updates=added))
            assert torch.equal(few, many[own])
    assert not torch.equal(many, exact_wide.product(x, weight, launch))
