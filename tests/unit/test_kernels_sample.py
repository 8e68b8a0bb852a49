"""Sampling on the device against its specification: noise to the ulp, the same survivors, the same tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sampling_twins import choose as plain_choice

from eyas.common.params import SamplingParams
from eyas.engine.kernels.sampling import sample as kernels
from eyas.engine.kernels.sampling.gumbel import gumbel_at, gumbel_from, words_of
from eyas.engine.kernels.sampling.ranking import id_of, key_of, value_of
from eyas.engine.kernels.sampling.top_k_top_p import SHORTLIST, cut_of
from eyas.engine.sampling.noise import gumbel_rows, streams
from eyas.engine.sampling.sampler import SampledRow, sample, survivors, tempered
from tests.unit.sampling_twins import DEVICE, MIXED, normal, ulps

pytestmark = pytest.mark.slow

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "noise.json").read_text())


def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


class Batch:
    """Rows with their own parameters; their slots are not their places."""

    def __init__(self, params: list[SamplingParams]) -> None:
        n = len(params)
        self.rows = [SampledRow(p, i % 3, 1000 * i + 7, (), (), ()) for i, p in enumerate(params)]
        order = [row.params for row in reversed(self.rows)]  # slot s holds row n - 1 - s

        def table(name: str, dtype: torch.dtype) -> torch.Tensor:
            return tensor([getattr(p, name) for p in order], dtype)

        self.tables = SimpleNamespace(
            temperature=table("temperature", torch.float32),
            top_p=table("top_p", torch.float32),
            min_p=table("min_p", torch.float32),
            top_k=table("top_k", torch.int32),
            seed=tensor([signed(p.seed) for p in order], torch.int64),
            choice=tensor([row.choice for row in reversed(self.rows)], torch.int32),
        )
        slots = tensor([n - 1 - i for i in range(n)], torch.int32)
        self.who = kernels.SampledRows(slots, tensor([row.position for row in self.rows], torch.int32))

    def choose(self, logits: torch.Tensor) -> list[int]:
        out = torch.full((len(self.rows),), -7, dtype=torch.int32, device=DEVICE)
        kernels.choose(logits, self.who, self.tables, out)
        return out.tolist()


# --- noise -----------------------------------------------------------------------------------------------


@triton.jit
def noise_kernel(seed, place, ids, words, rows, chosen, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    stream = tl.load(seed), tl.load(place), tl.load(place + 1)
    a, b, c, d = words_of(*stream, tl.load(ids + i) // 4)
    tl.store(words + i, a)
    tl.store(words + COUNT + i, b)
    tl.store(words + 2 * COUNT + i, c)
    tl.store(words + 3 * COUNT + i, d)
    tl.store(rows + i, gumbel_from(*stream, 64, COUNT))
    tl.store(chosen + i, gumbel_at(*stream, tl.load(ids + i)))


def noise_of(
    seed: int, position: int, choice: int, ids: list[int]
) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """The word of each id, G of ids 64, 65, .., and G of each id."""
    count = len(ids)
    words = torch.empty(4, count, dtype=torch.int32, device=DEVICE)
    rows, chosen = torch.empty(2, count, device=DEVICE)
    place = tensor([position, choice], torch.int32)
    which = tensor(ids, torch.int32)
    noise_kernel[(1,)](tensor([signed(seed)], torch.int64), place, which, words, rows, chosen, COUNT=count)
    own = words.cpu()[which.cpu().long() % 4, torch.arange(count)]
    return [f"{word % 2**32:08x}" for word in own.tolist()], rows.cpu(), chosen.cpu()


@pytest.mark.parametrize("case", VECTORS["gumbel"], ids=lambda case: f"{case['seed']}@{case['position']}")
def test_noise_vectors(case: dict) -> None:
    ids = (case["ids"] * 8)[:8]
    words, _, chosen = noise_of(case["seed"], case["position"], case["choice"], ids)
    assert words == (case["words"] * 8)[:8]
    bits = [int(bits, 16) for bits in (case["float32"] * 8)[:8]]
    expected = np.array(bits, dtype=np.uint32).view(np.float32)
    assert ulps(chosen.numpy(), expected).max() <= VECTORS["ulp"]


def test_noise_is_the_specifications_however_it_is_read() -> None:
    count, stream = 8192, (2**64 - 3, 131_071, 5)
    _, rows, chosen = noise_of(*stream, list(range(64, 64 + count)))
    assert torch.equal(rows, chosen)
    expected = gumbel_rows(streams([stream]), 64 + count)[0, 64:]
    assert ulps(rows.numpy(), expected.numpy()).max() <= VECTORS["ulp"]


@pytest.mark.parametrize("change", ["seed's low word", "seed's high word", "position", "choice"])
def test_every_part_of_the_key_matters(change: str) -> None:
    """Flat logits: whatever the key is taken to be decides the token."""
    batch = Batch([SamplingParams(seed=i << 31) for i in range(12)])
    flat = torch.zeros(12, 300, device=DEVICE)
    before = batch.choose(flat)
    parts = {"position": batch.who.positions, "choice": batch.tables.choice}
    step = 2**32 if change == "seed's high word" else 1
    parts.get(change, batch.tables.seed).add_(step)
    after = batch.choose(flat)
    assert sum(a != b for a, b in zip(before, after, strict=True)) > 8


# --- keys ------------------------------------------------------------------------------------------------


@triton.jit
def key_kernel(values, ids, keys, back, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    made = key_of(tl.load(values + i), tl.load(ids + i))
    tl.store(keys + i, made)
    tl.store(back + i, value_of(made))
    tl.store(ids + i, id_of(made))


def keys_of(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    keys = torch.empty(len(values), dtype=torch.int64, device=DEVICE)
    back, given = torch.empty_like(values), ids.clone()
    key_kernel[(1,)](values, ids, keys, back, COUNT=len(values))
    assert torch.equal(ids, given) and torch.equal(back, values)
    return keys


def test_keys_order_values_then_ids() -> None:
    special = [0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf, 3e38, -3e38]
    values = tensor(special * 4 + [0.25 * (i % 7) - 1 for i in range(32)], torch.float32)
    ids = torch.randperm(64, generator=torch.Generator().manual_seed(1)).to(torch.int32).to(DEVICE)
    ids[0] = 2**31 - 1
    order = keys_of(values, ids).argsort(descending=True).tolist()
    assert order == sorted(range(64), key=lambda i: (-values[i].item(), ids[i].item()))


# --- filters ---------------------------------------------------------------------------------------------


@triton.jit
def cut_kernel(
    logits, shortlist, temperature, top_k, top_p, min_p, cut, VOCAB: tl.constexpr, PEAKS: tl.constexpr
):
    block = tl.arange(0, PEAKS)[:, None] * 256 + tl.arange(0, 256)[None, :]
    peaks = tl.max(tl.load(logits + block, mask=block < VOCAB, other=-float("inf")), 1)
    top, t = tl.max(peaks), tl.load(temperature)
    filters = tl.load(top_k), tl.load(top_p), tl.load(min_p)
    real: tl.constexpr = (VOCAB + 255) // 256
    tl.store(cut, cut_of(logits, shortlist, peaks, top, t, *filters, VOCAB, real))


def kept(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    """The ids [vocab] that the kernel leaves."""
    vocab, cut = len(logits), torch.empty(1, dtype=torch.int64, device=DEVICE)
    names = ("temperature", "top_k", "top_p", "min_p")
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    given = [tensor([getattr(params, name)], d) for name, d in zip(names, dtypes, strict=True)]
    shortlist = torch.full((SHORTLIST.value,), math.nan, device=DEVICE)
    peaks = triton.next_power_of_2(triton.cdiv(vocab, 256))
    cut_kernel[(1,)](logits, shortlist, *given, cut, VOCAB=vocab, PEAKS=peaks)
    scores = tempered(logits.unsqueeze(0), [params])[0]
    padding = triton.next_power_of_2(vocab) - vocab
    ids = torch.arange(vocab + padding, dtype=torch.int32, device=DEVICE)
    keys = keys_of(torch.nn.functional.pad(scores, (0, padding)), ids)[:vocab]
    return (keys >= cut).nonzero().squeeze(1).tolist()


def expected(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    scores = survivors(tempered(logits.unsqueeze(0).cpu(), [params]), [params])[0]
    return (scores > -math.inf).nonzero().squeeze(1).tolist()


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 299},
    {"top_k": 10**6},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 250, "top_p": 0.5, "min_p": 0.01},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 3.0], ids=["flat", "peaked"])
def test_survivors_are_the_specifications(filters: dict, scale: float) -> None:
    """A flat row's nucleus is beyond the short list, a peaked row's is in it."""
    params = SamplingParams(temperature=0.8, **filters)
    logits = normal(300, scale=scale)
    assert plain_choice(logits.tolist(), SampledRow(params, 0, 0, (), (), ())).margin > 1e-6
    assert kept(logits, params) == expected(logits, params)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_survivors_among_ties(filters: dict) -> None:
    """Few values, many equals: the lowest ids have the room."""
    params = SamplingParams(temperature=2.0, **filters)
    logits = normal(300, scale=2.0).round()
    assert plain_choice(logits.tolist(), SampledRow(params, 0, 0, (), (), ())).margin > 1e-6
    assert kept(logits, params) == expected(logits, params)


def test_survivors_of_many_ids() -> None:
    """More candidates than the short list holds, by far or only just, and fewer."""
    logits = normal(9000, scale=0.5)
    for filters in ({"top_k": 6000}, {"top_k": 900, "top_p": 0.6}):
        params = SamplingParams(**filters)
        assert kept(logits, params) == expected(logits, params)
    towers = logits - 20.0 * (
        torch.arange(9000, device=DEVICE) // 256 % 2
    )  # every other block is listed, whole
    assert kept(towers, SamplingParams(top_k=3000)) == expected(towers, SamplingParams(top_k=3000))
    flat = torch.zeros(9000, device=DEVICE)
    assert kept(flat, SamplingParams(top_k=8500, top_p=1 / 1024)) == list(range(9))


def test_equal_scores_of_different_logits_are_ties() -> None:
    """What rounds to one score ties, though the search orders the logits themselves."""
    logits = torch.zeros(64, device=DEVICE)
    logits[5] = 1e6
    logits[40:] = torch.linspace(1e-3, 2e-3, 24)  # all -1e6 below the best
    params = SamplingParams(top_k=4, temperature=1.0)
    assert kept(logits, params) == expected(logits, params) == [0, 1, 2, 5]


def test_equal_masses_are_filled_from_the_lowest_ids() -> None:
    flat = torch.zeros(10, device=DEVICE)
    assert kept(flat, SamplingParams(top_k=3)) == [0, 1, 2]
    assert kept(flat, SamplingParams(top_p=0.35)) == [0, 1, 2, 3]
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], device=DEVICE).log()
    assert kept(logits, SamplingParams(top_k=2, top_p=0.6)) == [0]  # the first holds 0.5 / 0.8
    assert kept(logits, SamplingParams(top_k=2, top_p=0.9)) == [0, 1]
    assert kept(logits, SamplingParams(top_p=0.81)) == [0, 1, 2]
    assert kept(logits, SamplingParams(top_p=0.79)) == [0, 1]


def test_banned_ids_do_not_survive() -> None:
    logits = normal(600)
    logits[torch.randperm(600)[:590]] = -math.inf
    for filters in ({"top_p": 0.9}, {"top_k": 4}):
        params = SamplingParams(**filters)
        assert kept(logits, params) == expected(logits, params)


# --- tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [300, 2052])
def test_tokens_are_the_specifications(vocab: int) -> None:
    batch = Batch(MIXED * 3)  # more rows than count as few
    logits = normal(12, vocab)
    before = logits.clone()
    together = batch.choose(logits)
    assert torch.equal(logits, before)
    assert together == sample(logits.cpu(), batch.rows).tokens
    few = Batch(MIXED)
    assert few.choose(logits[:4].contiguous()) == together[:4]


def test_a_large_vocabulary() -> None:
    batch = Batch([SamplingParams(temperature=0.0), SamplingParams(seed=77)])
    logits = normal(2, 128_256)
    assert batch.choose(logits) == sample(logits.cpu(), batch.rows).tokens


@pytest.mark.parametrize("count", [2, 9])
def test_greedy_ties_go_to_the_lowest_id(count: int) -> None:
    batch = Batch([SamplingParams(temperature=0.0)] * count)
    for first, second in [(0, 299), (255, 256), (3, 4)]:
        logits = torch.full((count, 300), -1.0, device=DEVICE)
        logits[:, first], logits[:, second] = -0.0, 0.0
        assert batch.choose(logits) == [first] * count
    assert batch.choose(torch.full((count, 300), -math.inf, device=DEVICE)) == [0] * count


def test_the_coldest_temperature_is_greedy() -> None:
    batch = Batch([SamplingParams(temperature=1e-45, seed=1), SamplingParams(temperature=1e-6, seed=2)])
    logits = torch.tensor([[-50.0, 80.0, 79.0, 0.0]], device=DEVICE).repeat(2, 1)
    assert batch.choose(logits) == [1, 1]


def test_a_broken_row_gives_an_id_of_the_vocabulary() -> None:
    batch = Batch(MIXED[:3])
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        tokens = batch.choose(torch.full((3, 270), value, device=DEVICE))
        assert all(0 <= token < 270 for token in tokens)
