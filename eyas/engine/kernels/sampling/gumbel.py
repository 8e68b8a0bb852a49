"""Keyed Gumbel noise on the device, equal to `eyas.engine.sampling.noise` word for word.

Philox4x32-10 (Salmon et al., SC 2011) of the counter (id div 4, position, choice, 0) under the 64-bit seed
gives the words of four ids. Integers are exact. The inner logarithm is computed in float64, where 1 - w is
exact: a float32 log1p may be off by an ulp, and where it is near -1, G is near 0 and that is many ulps of G.
"""

import triton
import triton.language as tl

_LARGEST_W = tl.constexpr(1.0 - 2.0**-24)
_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def gumbel_from(seed, position, choice, first, COUNT: tl.constexpr):
    """G for the ids first, first + 1, ..: float32 [COUNT]. `first` and COUNT are multiples of 4."""
    blocks = first // 4 + tl.arange(0, COUNT // 4)
    a, b, c, d = words_of(seed, position, choice, blocks)
    words = tl.join(tl.join(a, c), tl.join(b, d))  # [.., i, j]: word 2 i + j
    return gumbel_of(words.reshape(COUNT))


@triton.jit
def gumbel_at(seed, position, choice, ids):
    """G for any int32 `ids`, at four times the cost per id."""
    a, b, c, d = words_of(seed, position, choice, ids // 4)
    lane = ids % 4
    return gumbel_of(tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d)))


@triton.jit
def words_of(seed, position, choice, blocks):
    """The four uint32 words of each block. seed: int64; position and choice: int32."""
    zero = blocks * 0
    return tl.philox(seed, blocks, zero + position, zero + choice, zero)


@triton.jit
def gumbel_of(words):
    """-log(-log1p(-w)), where w comes from uint32 words."""
    w = tl.minimum((words.to(tl.float32) + 0.5) * _UNIT, _LARGEST_W)
    survival = tl.log(1.0 - w.to(tl.float64)).to(tl.float32)
    return -tl.log(-survival)
