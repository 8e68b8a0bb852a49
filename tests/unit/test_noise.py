"""The keyed noise: known answers, the plain twin, and bits that do not depend on where they are computed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_twins import gumbel, gumbel_of_word, philox, threads, word

from eyas.engine.sampling import noise
from eyas.engine.sampling.noise import gumbel_at, gumbel_rows, streams
from tests.unit.sampling_twins import ulps

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "noise.json").read_text())
WORDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("case", VECTORS["philox"], ids=lambda case: case["name"])
def test_philox_gives_the_published_words(case: dict) -> None:
    key, counter = ([int(w, 16) for w in case[part]] for part in ("key", "counter"))
    expected = tuple(int(w, 16) for w in case["words"])
    assert philox(tuple(key), tuple(counter)) == expected
    if counter[3] == 0:  # the noise never uses the last counter word
        stream = torch.tensor([[*key, counter[1], counter[2]]])
        assert tuple(noise._philox(stream, torch.tensor([[counter[0]]])).flatten().tolist()) == expected


@pytest.mark.parametrize("case", VECTORS["gumbel"], ids=lambda case: f"{case['seed']}@{case['position']}")
def test_noise_vectors(case: dict) -> None:
    seed, position, choice, ids = case["seed"], case["position"], case["choice"], case["ids"]
    assert [f"{word(seed, position, choice, v):08x}" for v in ids] == case["words"]
    expected = np.array([int(bits, 16) for bits in case["float32"]], dtype=np.uint32).view(np.float32)
    found = gumbel_at(streams([(seed, position, choice)]), torch.tensor([ids])).numpy()[0]
    assert ulps(found, expected).max() <= VECTORS["ulp"]


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
    choice=st.integers(0, 127),
    ids=st.lists(st.integers(0, 200_000), min_size=1, max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_noise_equals_its_plain_twin(seed: int, position: int, choice: int, ids: list[int]) -> None:
    found = gumbel_at(streams([(seed, position, choice)]), torch.tensor([ids])).numpy()[0]
    expected = np.array([gumbel(seed, position, choice, v) for v in ids], dtype=np.float32)
    assert ulps(found, expected).max() <= 4


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("vocab_size", [1, 3, 5, 64, 4096, 4099, 128_256])
def test_bits_depend_on_the_element_alone(vocab_size: int, count: int) -> None:
    """Rows and chosen ids, alone and in company, in any order and stride: the same bits."""
    with threads(count):
        stream = streams([(2**64 - 1, 7, 0), (5, 2**20, 3), (5, 2**20, 4)])
        rows = gumbel_rows(stream, vocab_size)
        for r in range(len(stream)):
            assert torch.equal(gumbel_rows(stream[r : r + 1], vocab_size)[0], rows[r])
        picked = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
        for ids in (picked, picked[: 1 + vocab_size // 3], picked[::3], torch.arange(vocab_size)):
            assert torch.equal(gumbel_at(stream, ids.unsqueeze(0)), rows[:, ids])
        for v in picked[:50].tolist():
            assert gumbel_at(stream[1:2], torch.tensor([[v]])).item() == rows[1, v].item()


def test_every_part_of_the_key_matters() -> None:
    base = (3 + 2**40, 10, 1)
    others = [(4 + 2**40, 10, 1), (3 + 2**41, 10, 1), (3 + 2**40, 11, 1), (3 + 2**40, 10, 2)]
    rows = gumbel_rows(streams([base, *others]), 64)
    assert all(not torch.isclose(rows[0], row).any() for row in rows[1:])


def test_noise_is_finite_for_every_word() -> None:
    """G falls with x, so the ends bound it; the usual -log(-log u) is infinite at the upper end."""
    ends = torch.tensor([0, 2**32 - 1])
    assert torch.allclose(noise._gumbel(ends), torch.tensor([22.873856, -2.8115559]))
    assert noise._gumbel(ends).tolist() == [gumbel_of_word(0), gumbel_of_word(2**32 - 1)]
    edges = [2**bit + near for bit in range(1, 32) for near in (-2, -1, 0, 1)]
    steps = noise._gumbel(torch.tensor(sorted({0, *edges, *range(0, 2**32, 2**20), 2**32 - 1})))
    assert bool((steps[:-1] >= steps[1:]).all())
    u = (ends[1:].float() + 0.5) * 2.0**-32
    assert torch.isinf(-torch.log(-torch.log(u)))


@given(x=WORDS)
@settings(max_examples=100, deadline=None)
def test_one_word_to_the_bit(x: int) -> None:
    assert noise._gumbel(torch.tensor([x])).item() == gumbel_of_word(x)


def test_speed_of_a_step() -> None:
    """Eight rows of the embedded model's vocabulary take half a millisecond of one core; four is a defect."""
    stream = streams([(i, i, 0) for i in range(8)])
    spent = []
    with threads(1):
        for _ in range(20):
            start = time.thread_time()
            gumbel_rows(stream, 4096)
            spent.append(time.thread_time() - start)
    assert min(spent) < 0.004
