"""Drafts that are looked up on the device, after a round's verdict: one program per sequence.

`eyas.engine.speculation.drafters.lookup` is the specification, to the bit; the numbers of its rule come from
there. The texts searched lie in the tables: what a sequence says so far, and what its caller predicted. Where
a head has proposed before, its proposal stays or gives way.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from eyas.engine.batch.tables import LOOKING
from eyas.engine.kernels.drafts.rounds import PLAIN, RoundBatch
from eyas.engine.kernels.launch.launching import after_previous, kernel
from eyas.engine.kernels.launch.sizes import power_of_2

_TILE = 2048  # places that are compared at a time
_PROMPT, _PREDICTED, _TOKENS, _LOOKED_UP, _HEADED, _LOOKUP, _HEAD = map(tl.constexpr, range(len(LOOKING)))
# A match's key: its length from bit 32 on, bit 31 if it is in the prediction, then its rank.
_LENGTH = tl.constexpr(32)
_IS_PREDICTED = tl.constexpr(31)
_RANK = tl.constexpr((1 << 31) - 1)
_NEAREST = tl.constexpr(1 << 30)  # the rank of the place in a prediction where the answer stands


@dataclass(frozen=True)
class LookupRule:
    """The numbers of `speculation.lookup`, and who else proposes.

    `depth`: drafts per proposal. `history`: the sequences' own texts are searched too. `headed`: a head has
    proposed before. `trees`: its drafts may branch.
    """

    longest: int
    shortest: int
    certain: int
    lag: int
    depth: int
    history: bool
    headed: bool
    trees: bool


def look_up(batch: RoundBatch, rule: LookupRule) -> None:
    """The drafts of every sequence of `batch` that is drafted for, where the rule finds some.

    A sequence's root stands in its text already. Sequences for which nothing is found keep the drafts that
    they have.
    """
    tables = batch.tables
    _look_up[(batch.size,)](
        *(batch.slots, tables.length, tables.speculative, tables.text, tables.predicted, tables.looking),
        *(tables.drafts, tables.parents, tables.mask, tables.depth),
        *(tables.padding_slot, tables.text.shape[1], tables.predicted.shape[1]),
        *(tables.drafts.shape[1], tables.depth.shape[1]),
        LONGEST=rule.longest,
        SHORTEST=rule.shortest,
        CERTAIN=rule.certain,
        LAG=rule.lag,
        DEPTH=rule.depth,
        HISTORY=rule.history,
        HEADED=rule.headed,
        TREES=rule.trees,
        NODES=power_of_2(tables.drafts.shape[1]),
        WORDS=len(LOOKING),
        TILE=min(_TILE, power_of_2(tables.text.shape[1])),
        PDL=batch.pdl,
        num_warps=8,
        launch_pdl=batch.pdl,
    )


@kernel(do_not_specialize=(*PLAIN, "prediction", "looking", "predicted_stride"))
def _look_up(
    slots,
    length,
    speculative,
    text,
    prediction,
    looking,
    drafts,
    parents,
    mask,
    depth,
    padding,
    context,
    predicted_stride,
    drafts_stride,
    nodes_stride,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    CERTAIN: tl.constexpr,
    LAG: tl.constexpr,
    DEPTH: tl.constexpr,
    HISTORY: tl.constexpr,
    HEADED: tl.constexpr,
    TREES: tl.constexpr,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    record, deepest = looking + slot * WORDS, tl.load(speculative + slot)
    if (slot != padding) & (deepest != 0):
        text += slot * context
        prediction += slot * predicted_stride
        count = tl.minimum(tl.load(length + slot) + 1, context)
        answered = count - tl.load(record + _PROMPT)
        prediction_count = tl.load(record + _PREDICTED)
        best = tl.full([], 0, tl.int64)
        best = _best(
            text, count, prediction, LONGEST, prediction_count, answered, best, True, LONGEST, SHORTEST, TILE
        )
        if HISTORY:
            best = _best(text, count, text, 1, count, 0, best, False, LONGEST, SHORTEST, TILE)
        match = (best >> _LENGTH).to(tl.int32)
        node = tl.arange(0, NODES)
        token = _followers(best, text, count, prediction, prediction_count, LONGEST + answered, node, DEPTH)
        token = tl.where(node < deepest, token, -1)
        proposes = match > 0
        if HEADED:
            there = tl.load(drafts + slot * drafts_stride) >= 0
            looked_up = tl.max(tl.where(node == 0, token, -1))
            proposes = _prefers(record, text, count, match, looked_up, there, CERTAIN, LAG)
        if proposes:
            inside = node < drafts_stride
            tl.store(drafts + slot * drafts_stride + node, token, mask=inside)
            if TREES:
                below = slot * nodes_stride + 1
                chained = inside & (node < DEPTH)
                _chain(parents + slot * drafts_stride, mask + below, depth + below, node, chained)


@triton.jit
def _best(
    text,
    count,
    searched,
    first,
    stop,
    answered,
    best,
    PREDICTED: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest key of a match that ends in `searched` at first .. stop - 1, or `best` if that is larger.

    Keys order matches as the rule does. Nothing is searched if `best` matches in full: no match of the
    text itself could be better.
    """
    if (best >> _LENGTH) < LONGEST:
        for begin in range(first, stop, TILE):
            end = begin + tl.arange(0, TILE)
            alive = end < stop
            match = tl.zeros([TILE], tl.int32)
            for back in tl.static_range(LONGEST):
                own = tl.load(text + count - 1 - back, mask=count > back, other=-2)
                other = tl.load(searched + end - 1 - back, mask=alive & (end > back), other=-1)
                alive = alive & (other == own)
                match += alive.to(tl.int32)
            if PREDICTED:
                ahead = end - LONGEST - answered
                rank = _NEAREST - 2 * tl.abs(ahead) + (ahead > 0).to(tl.int32)
            else:
                rank = end
            key = (
                (match.to(tl.int64) << _LENGTH)
                + (tl.full([TILE], PREDICTED, tl.int64) << _IS_PREDICTED)
                + rank
            )
            key = tl.where(match >= SHORTEST, key, 0)
            best = tl.maximum(best, tl.max(key))
    return best


@triton.jit
def _followers(best, text, count, prediction, prediction_count, near, node, DEPTH: tl.constexpr):
    """The tokens that follow the match of a key; -1: none. `near`: the place whose rank is `_NEAREST`."""
    rank, in_prediction = (best & _RANK).to(tl.int32), (best >> _IS_PREDICTED) & 1
    off = _NEAREST - rank
    here = near + node + tl.where(rank & 1 == 1, (off + 1) // 2, -(off // 2))
    follows = (best > 0) & (node < DEPTH)
    predicted = follows & (in_prediction == 1) & (here < prediction_count)
    copied = follows & (in_prediction == 0)
    place = rank + node % tl.maximum(count - rank, 1)
    token = tl.load(text + place, mask=copied, other=-1)
    return tl.where(predicted, tl.load(prediction + here, mask=predicted, other=-1), token)


@triton.jit
def _prefers(record, text, count, match, looked_up, there, CERTAIN: tl.constexpr, LAG: tl.constexpr):
    """Learns what came of the newest drafts. Does the lookup propose, although a head may be `there`?"""
    lookup, head = tl.load(record + _LOOKUP), tl.load(record + _HEAD)
    before, expected = tl.load(record + _TOKENS), tl.load(record + _LOOKED_UP)
    if (before > 0) & (before < count):
        if expected >= 0:
            lookup += (CERTAIN * (tl.load(text + before) == expected).to(tl.int32) - lookup) >> LAG
        if tl.load(record + _HEADED) != 0:
            head += (CERTAIN * (count - before > 1).to(tl.int32) - head) >> LAG
    trusted = (match > 0) & (lookup * match >= head * (match + 1))
    headed = there & (trusted == 0)
    tl.debug_barrier()  # another thread may still have to read what is written now
    tl.store(record + _TOKENS, count)
    tl.store(record + _LOOKED_UP, looked_up)
    tl.store(record + _HEADED, headed.to(tl.int32))
    tl.store(record + _LOOKUP, lookup)
    tl.store(record + _HEAD, head)
    return (match > 0) & (headed == 0)


@triton.jit
def _chain(parents, mask, depth, node, chained):
    """These drafts of a slot are a chain: addresses of its parents, and of their masks and depths.

    Of a mask of several words that is the first: no chain is so deep that the others show a row of it.
    """
    tl.store(parents + node, node - 1, mask=chained)
    tl.store(mask + node, (tl.full(node.shape, 4, tl.int64) << node) - 1, mask=chained)
    tl.store(depth + node, node + 1, mask=chained)
