"""Top-k, then top-p, then min-p of a row: the ids whose `ranking` key is at least a cut survive.

The rules, ties included, are those of `eyas.engine.sampling.sampler`. Filters keep a row's best ids, so one
key describes the result. A search finds it: how much do the logits from a certain value on weigh, as a count
or as a mass of probability? Most nuclei are small. So the search runs over a short list of the best logits if
that is certain to hold the answer, and over the whole row otherwise.
"""

import triton
import triton.language as tl

from eyas.engine.kernels.sampling.ranking import LAST_ID, key_of, lowest_key_of, order_of, value_of_order

SHORTLIST = tl.constexpr(4096)  # logits in a row's short list
_NEGLIGIBLE = tl.constexpr(30.0)  # nats below the best id: no short list needs to reach further down
_TINY = tl.constexpr(2.0**-126)
_TILE = tl.constexpr(2048)
_TILES_AT_ONCE = tl.constexpr(4)  # loads in flight
_WIDE_TILE = tl.constexpr(8192)


@triton.jit
def score_of(logits, top, temperature):
    """`filters.tempered`: float32, 0 for the row's best logit `top`."""
    return tl.div_rn(logits - top, tl.maximum(temperature, _TINY))


@triton.jit
def cut_of(row, shortlist, peaks, top, temperature, k, p, min_p, VOCAB: tl.constexpr, PEAKS: tl.constexpr):
    """The lowest key that survives. `peaks` [n]: the greatest logit of each of PEAKS parts, then -inf."""
    cut = lowest_key_of(tl.log(min_p.to(tl.float64)).to(tl.float32))
    counted = (k > 0) & (k < VOCAB)
    if counted | (p < 1.0):
        floor = _floor(peaks, top, temperature, PEAKS)
        listed, mass, all_mass = _shorten(row, shortlist, floor, top, temperature, VOCAB)
        tl.debug_barrier()  # other threads read the list than those that wrote it
        if counted:
            short = (listed <= SHORTLIST) & (k <= listed)
            order = _search(row, shortlist, short, listed, top, temperature, k.to(tl.float64), False, VOCAB)
            kth, all_mass = _fill(row, order, k.to(tl.float64), top, temperature, False, VOCAB)
            cut = tl.maximum(cut, kth)
        if p < 1.0:
            target = p.to(tl.float64) * all_mass
            short = (listed <= SHORTLIST) & (target <= mass)
            order = _search(row, shortlist, short, listed, top, temperature, target, True, VOCAB)
            last, _ = _fill(row, order, target, top, temperature, True, VOCAB)
            cut = tl.maximum(cut, last)
    return cut


@triton.jit
def _floor(peaks, top, temperature, PEAKS: tl.constexpr):
    """A logit above which many ids lie, but not too many. A guess: the result is right for any value."""
    real = tl.arange(0, peaks.shape[0]) < PEAKS
    peaks = tl.where(real, tl.maximum(peaks, top - _NEGLIGIBLE * temperature), 0.0)
    mean = tl.sum(peaks) / PEAKS
    spread = tl.where(real, peaks - mean, 0.0)
    return mean - tl.sqrt(tl.sum(spread * spread) / PEAKS)


@triton.jit
def _shorten(row, shortlist, floor, top, temperature, VOCAB: tl.constexpr):
    """Lists the logits from `floor` up, while there is room. Their count, their mass, and the row's."""
    count = 0
    mass = tl.zeros([_WIDE_TILE], tl.float32)
    all_mass = tl.zeros([_WIDE_TILE], tl.float32)
    for start in range(0, VOCAB, _WIDE_TILE):
        ids = start + tl.arange(0, _WIDE_TILE)
        logits = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf"))
        weights = _weights(logits, top, temperature, True)
        chosen = (logits >= floor) & (ids < VOCAB)
        places = count + tl.cumsum(chosen.to(tl.int32)) - 1
        tl.store(shortlist + places, logits, mask=chosen & (places < SHORTLIST))
        count += tl.sum(chosen.to(tl.int32))
        all_mass += weights
        mass += tl.where(chosen, weights, 0.0)
    return count, tl.sum(mass.to(tl.float64)), tl.sum(all_mass.to(tl.float64))


@triton.jit
def _search(row, shortlist, short, listed, top, temperature, target, MASS: tl.constexpr, VOCAB: tl.constexpr):
    """The greatest order such that the logits from it up weigh at least `target`; the lowest if none does.

    Each pass divides the interval of the answer by four.
    """
    values = row
    if short:
        values = shortlist
    size = tl.where(short, listed, VOCAB)
    high = order_of(top).to(tl.int64)
    low = order_of(top * 0.0 - float("inf")).to(tl.int64)
    while low < high:
        quarter = (high - low + 3) // 4
        a = low + quarter
        b = tl.minimum(a + quarter, high)
        c = tl.minimum(b + quarter, high)
        from_a, from_b, from_c = _weights_from(values, size, a, b, c, top, temperature, MASS)
        low_half = tl.where(from_a >= target, b - 1, a - 1)
        high = tl.where(from_c >= target, high, tl.where(from_b >= target, c - 1, low_half))
        low = tl.where(from_a >= target, a, low)
        low = tl.where(from_b >= target, b, low)
        low = tl.where(from_c >= target, c, low)
    return low.to(tl.int32)


@triton.jit
def _weights_from(values, size, a, b, c, top, temperature, MASS: tl.constexpr):
    """The weights of the first `size` of `values` from the orders a <= b <= c up: three float64.

    A lane adds few numbers, in float32. The lanes are added in float64, in a fixed order.
    """
    a = value_of_order(a.to(tl.int32))
    b = value_of_order(b.to(tl.int32))
    c = value_of_order(c.to(tl.int32))
    lane = tl.arange(0, _TILE)
    sum_a = tl.zeros([_TILE], tl.float32)
    sum_b = tl.zeros([_TILE], tl.float32)
    sum_c = tl.zeros([_TILE], tl.float32)
    start = 0
    while start < size:
        for tile in tl.static_range(_TILES_AT_ONCE):
            place = start + tile * _TILE + lane
            logits = tl.load(values + place, mask=place < size, other=-float("inf"))
            weights = tl.where(place < size, _weights(logits, top, temperature, MASS), 0.0)
            sum_a += tl.where(logits >= a, weights, 0.0)
            sum_b += tl.where(logits >= b, weights, 0.0)
            sum_c += tl.where(logits >= c, weights, 0.0)
        start += _TILES_AT_ONCE * _TILE
    return tl.sum(sum_a.to(tl.float64)), tl.sum(sum_b.to(tl.float64)), tl.sum(sum_c.to(tl.float64))


@triton.jit
def _weights(logits, top, temperature, MASS: tl.constexpr):
    """1 each, or the probability relative to the best id's; one more rounding does not matter here."""
    if MASS:
        return tl.exp((logits - top) * (1.0 / tl.maximum(temperature, _TINY)))
    else:
        return tl.full(logits.shape, 1.0, tl.float32)


@triton.jit
def _fill(row, order, target, top, temperature, MASS: tl.constexpr, VOCAB: tl.constexpr):
    """Keeps ids until they weigh `target`; returns the key of the last one and the mass kept.

    The last one has the score of the logit `order`. Of ids with equal scores, the lowest are kept.
    """
    score = score_of(value_of_order(order), top, temperature)
    above, mass_above, level = _weights_about(row, score, top, temperature, VOCAB)
    each = tl.exp(score).to(tl.float64)
    if MASS:
        room = tl.ceil((target - mass_above) / tl.maximum(each, _TINY))
    else:
        room = target - above
    room = tl.minimum(tl.maximum(room, 1.0), level)
    last = order * 0 + LAST_ID
    if room < level:
        last = _nth_at(row, score, room.to(tl.int32), top, temperature, VOCAB)
    return key_of(score, last), mass_above + room * each


@triton.jit
def _weights_about(row, score, top, temperature, VOCAB: tl.constexpr):
    """The count and the mass of the ids above `score`, and the count of those at it: three float64."""
    lane = tl.arange(0, _TILE)
    above = tl.zeros([_TILE], tl.float32)
    mass = tl.zeros([_TILE], tl.float32)
    level = tl.zeros([_TILE], tl.float32)
    for start in range(0, VOCAB, _TILES_AT_ONCE * _TILE):
        for tile in tl.static_range(_TILES_AT_ONCE):
            ids = start + tile * _TILE + lane
            logits = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf"))
            scores = score_of(logits, top, temperature)
            above += tl.where(scores > score, 1.0, 0.0)
            mass += tl.where(scores > score, tl.exp(scores), 0.0)
            level += tl.where((scores == score) & (ids < VOCAB), 1.0, 0.0)
    return tl.sum(above.to(tl.float64)), tl.sum(mass.to(tl.float64)), tl.sum(level.to(tl.float64))


@triton.jit
def _nth_at(row, score, nth, top, temperature, VOCAB: tl.constexpr):
    """The nth lowest id (n from 1) among those at `score`."""
    seen = 0
    nth_id = 0
    for start in range(0, VOCAB, _WIDE_TILE):
        ids = start + tl.arange(0, _WIDE_TILE)
        logits = tl.load(row + ids, mask=ids < VOCAB, other=-float("inf"))
        level = (score_of(logits, top, temperature) == score) & (ids < VOCAB)
        places = seen + tl.cumsum(level.to(tl.int32))
        nth_id = tl.maximum(nth_id, tl.max(tl.where(level & (places <= nth), ids, 0)))
        seen += tl.sum(level.to(tl.int32))
    return nth_id
