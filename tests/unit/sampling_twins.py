"""Slow, plain renderings of what the sampling package computes: one id and one row at a time.

They are the specification that tests compare against, written from the design alone: nothing here computes
with torch, and nothing of the code under test is imported except its nouns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from eyas.common.params import SamplingParams
from eyas.engine.sampling.processors import SampledRow

F = np.float32


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch on `count` threads. Short operations want one: on a busy machine a second is mostly waiting."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 on Python integers."""
    (k0, k1), (a, b, c, d) = key, counter
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ k0, right % 2**32, (left >> 32) ^ d ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return a, b, c, d


def word(seed: int, position: int, choice: int, token: int) -> int:
    return philox((seed % 2**32, seed >> 32), (token // 4, position, choice, 0))[token % 4]


def gumbel_of_word(x: int) -> np.float32:
    w = min((F(x) + F(0.5)) * F(2.0**-32), F(1.0 - 2.0**-24))
    inner = F(math.log1p(-float(w)))
    return F(-F(math.log(-float(inner))))


def gumbel(seed: int, position: int, choice: int, token: int) -> np.float32:
    return gumbel_of_word(word(seed, position, choice, token))


@dataclass(frozen=True)
class Choice:
    """What the plain sampler found. `margin`: how near a filter's boundary was to falling otherwise."""

    token: int
    kept: set[int]
    margin: float


def choose(logits: Sequence[float], row: SampledRow) -> Choice:
    """The token of one row, following the order of processors and filters word for word."""
    p = row.params
    x = _adjusted([F(v) for v in logits], row)
    if p.temperature == 0.0:
        return Choice(_first_best(x), set(range(len(x))), math.inf)
    top = max(x)
    x = [(v - top) / F(p.temperature) for v in x]
    ranked = sorted((v for v in range(len(x)) if x[v] > -math.inf), key=lambda v: (-x[v], v))
    if p.top_k:
        ranked = ranked[: p.top_k]
    margin = math.inf
    if p.top_p < 1.0:
        weight = [math.exp(x[v]) for v in ranked]
        sums = np.cumsum(weight) / sum(weight)
        margin = float(np.abs(sums[:-1] - p.top_p).min(initial=math.inf))
        ranked = ranked[: int((sums < p.top_p).sum()) + 1]
    if p.min_p > 0.0:
        margin = min(margin, min(abs(float(x[v]) - math.log(p.min_p)) for v in ranked))
        ranked = [v for v in ranked if x[v] >= math.log(p.min_p)]
    noisy = {v: x[v] + gumbel(p.seed, row.position, row.choice, v) for v in ranked}
    return Choice(max(sorted(noisy), key=lambda v: noisy[v]), set(ranked), margin)


def _adjusted(x: list[np.float32], row: SampledRow) -> list[np.float32]:
    p = row.params
    written = [*row.output, *row.ancestors]
    for token, bias in p.logit_bias.items():
        x[token] = x[token] + F(bias)
    for token in {*row.prompt, *written}:
        factor = F(p.repetition_penalty)
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(written):
        x[token] = x[token] - F(p.presence_penalty)
        x[token] = x[token] - F(p.frequency_penalty) * F(written.count(token))
    for token in row.banned:
        x[token] = F(-math.inf)
    for *begun, last in p.bad_words:
        if not begun or written[-len(begun) :] == begun:
            x[last] = F(-math.inf)
    return x


def _first_best(x: list[np.float32]) -> int:
    return x.index(max(x))


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance in representable float32 values; bits are mapped so that their order is the numbers'."""
    ranks = [bits.astype(np.int64) for bits in (a.view(np.int32), b.view(np.int32))]
    ordered = [np.where(rank < 0, -(2**31) - rank, rank) for rank in ranks]
    return np.abs(ordered[0] - ordered[1])


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=2**64 - 5),
    SamplingParams(seed=2**40 + 1, temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(seed=3, temperature=1.7, min_p=0.02),
]


def normal(*sizes: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randn(*sizes, generator=generator).mul_(scale).to(DEVICE)
