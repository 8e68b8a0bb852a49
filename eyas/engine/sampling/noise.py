"""Keyed Gumbel noise: the number G(seed, position, choice, id), a pure function with random access.

Philox4x32-10 turns the key (the 64-bit seed, low word first) and the counter
(id div 4, position, choice, 0) into four 32-bit words; x is word `id mod 4`, and

    w = min((float32(x) + 0.5) * 2^-32, 1 - 2^-24)        G = -log(-log1p(-w))

with every operation rounded to float32. w is never 0 nor 1, so G lies between -2.9 and 22.9: always finite.

Both logarithms are computed in float64 and rounded once, so that an element's bits depend neither on its
place in a tensor nor on the vector width of the host's mathematical library.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
LARGEST_W = 1.0 - 2.0**-24


def streams(draws: Iterable[tuple[int, int, int]], device: torch.device | str = "cpu") -> Tensor:
    """One noise stream for each (seed, position, choice): int64 [R, 4], each entry a 32-bit word.

    The columns are the seed's low word, its high word, position and choice. Index the result to repeat,
    drop or reorder streams.
    """
    words = [(seed & WORD, seed >> 32, position, choice) for seed, position, choice in draws]
    return torch.tensor(words, dtype=torch.int64, device=device).view(-1, 4)


def gumbel_rows(stream: Tensor, vocab_size: int) -> Tensor:
    """G for every id below `vocab_size`: streams [R, 4] -> float32 [R, vocab_size]."""
    blocks = torch.arange((vocab_size + 3) // 4, device=stream.device).unsqueeze(0)
    return _gumbel(_philox(stream, blocks).flatten(1)[:, :vocab_size])


def gumbel_at(stream: Tensor, ids: Tensor) -> Tensor:
    """G for chosen ids: streams [R, 4], ids int64 [R, K] or [1, K] -> float32 [R, K].

    Bit-equal to the same elements of `gumbel_rows`, at four times the cost per id.
    """
    words = _philox(stream, ids // 4)
    lane = (ids % 4).expand(words.shape[:-1]).unsqueeze(-1)
    return _gumbel(words.gather(-1, lane).squeeze(-1))


def _philox(stream: Tensor, blocks: Tensor) -> Tensor:
    """Random words of each stream's blocks: [R, 4], [R or 1, B] -> int64 [R, B, 4], each below 2^32.

    A 32 x 32 bit product wraps to a negative int64 without losing a bit, so its high word is a shift and
    a mask. Words that are only XORed into the next round carry garbage above bit 31 until that mask.
    """
    key_low, key_high, position, choice = stream.unsqueeze(-1).unbind(1)
    a, b, c, d = blocks, position, choice, torch.zeros_like(choice)
    for _ in range(ROUNDS):
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = ((right >> 32) ^ (b ^ key_low)) & WORD, right
        c, d = ((left >> 32) ^ (d ^ key_high)) & WORD, left
        key_low, key_high = key_low + KEY_STEPS[0], key_high + KEY_STEPS[1]
    return torch.stack((a, b & WORD, c, d & WORD), dim=-1)


def _gumbel(words: Tensor) -> Tensor:
    w = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_W)
    survival = (1.0 - w.double()).log_().float()  # 1 - w is exact: w is a multiple of 2^-33
    return survival.neg_().double().log_().float().neg_()
