"""Special rows on the device: logits after bias, penalties and bans; log-probabilities of the model's own.

The specifications are `eyas.engine.sampling.processors` and `eyas.engine.sampling.scores`. A row's program
goes through the whole row, so what is reserved per row is one row of logits and one of counts. A node of a
tree reads the drafts above it from the tables, and the text before them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.common.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_TOP_LOGPROBS
from eyas.engine.batch.tables import SlotTables
from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv, power_of_2
from eyas.engine.kernels.sampling.ranking import LOWEST_KEY, id_of, key_of, unmarked, value_of

COLUMNS = (
    "place",  # which of the step's sampled rows it is made of
    "slot",
    "node",  # of the slot's tree; 0: the root, or a prompt's last row
    "position",  # of the token to be chosen; -1: one after the row's own
    "choice",  # whose noise it has
    "own",  # 1: the token is the sampled row's; 0: another choice's first one
    "top",  # best ids to be told beside the token's log-probability; -1: neither
    "prompt",  # ids of the text that are the prompt's
    "reads_text",  # 1: penalties or bad words
    "min_tokens",
    "endings",  # entries of the slot's lists
    "biases",
    "bad_words",
    "repetition",  # float32
    "presence",
    "frequency",
)
REPORT_WORDS = 2 + 2 * MAX_TOP_LOGPROBS
"""Of a row's report: its token, that one's log-probability (float32), the best ids, and theirs."""

_PLACE, _SLOT, _NODE, _POSITION, _CHOICE, _OWN, _TOP, _PROMPT = map(tl.constexpr, range(8))
_READS_TEXT, _MIN_TOKENS, _ENDINGS, _BIASES, _BAD_WORDS = map(tl.constexpr, range(8, 13))
_REPETITION, _PRESENCE, _FREQUENCY, _STRIDE = map(tl.constexpr, range(13, 17))
_MOST_TOP = tl.constexpr(MAX_TOP_LOGPROBS)
_WORDS = tl.constexpr(REPORT_WORDS)
_LONGEST = tl.constexpr(MAX_BAD_WORD_TOKENS)
_BAD_LIST = tl.constexpr(MAX_BAD_WORDS)
_IN_PROMPT = tl.constexpr(1 << 30)  # beside an id's count in the output
_PEAK = 256  # ids that one peak stands for
_TILE = 4096
_LIST = tl.constexpr(128)  # entries of a list at a time


@dataclass(frozen=True)
class SpecialWorkspace:
    """Memory for R special rows at a time.

    `rows` int32 [R, len(COLUMNS)]; `masks` int32 [R, mask_words(vocab)]; `logits` float32 and `counts`
    int32 [R, vocab]; `peaks` int64 [R, P]; `slots`, `positions`, `choices`, `tokens` and `unsettled` (-1)
    int32 [R]; `reports` int32 [R, REPORT_WORDS].
    """

    rows: torch.Tensor
    masks: torch.Tensor
    logits: torch.Tensor
    counts: torch.Tensor
    peaks: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor
    tokens: torch.Tensor
    unsettled: torch.Tensor
    reports: torch.Tensor

    @classmethod
    def on(cls, device: str, rows: int, vocab: int) -> SpecialWorkspace:
        """Allocates it on `device`, for `rows` special rows."""

        def ints(*sizes: int) -> torch.Tensor:
            return torch.zeros(sizes, dtype=torch.int32, device=device)

        return cls(
            rows=ints(rows, len(COLUMNS)),
            masks=ints(rows, mask_words(vocab)),
            logits=torch.empty(rows, vocab, dtype=torch.float32, device=device),
            counts=ints(rows, vocab),
            peaks=torch.empty(rows, cdiv(vocab, _PEAK), dtype=torch.int64, device=device),
            slots=ints(rows),
            positions=ints(rows),
            choices=ints(rows),
            tokens=ints(rows),
            unsettled=ints(rows) - 1,
            reports=ints(rows, REPORT_WORDS),
        )


def process(
    logits: torch.Tensor, positions: torch.Tensor, tables: SlotTables, work: SpecialWorkspace, count: int
) -> None:
    """The first `count` of `work.rows`: their processed logits, slots, positions and choices stand in `work`.

    `logits` float32 [N, vocab] of the step's sampled rows, not modified; `positions` int32: of rounds' rows.
    """
    _process[(count,)](
        *(logits, logits.stride(0), positions, work.rows, work.slots, work.positions, work.choices),
        *(tables.drafts, tables.parents, tables.text, tables.bias_ids, tables.bias),
        *(tables.endings, tables.bad_words, work.logits, work.counts),
        *(tables.drafts.shape[1], tables.text.shape[1], tables.bias.shape[1], tables.endings.shape[1]),
        VOCAB=logits.shape[1],
        TILE=min(_TILE, power_of_2(logits.shape[1])),
        num_warps=16,
    )


def mask_words(vocab: int) -> int:
    """Words of a mask over `vocab` ids: bit id % 32 of word id // 32 is 1 where the id may be chosen."""
    return -(-vocab // 32)


def mask(work: SpecialWorkspace, count: int) -> None:
    """Sets the first `count` of `work.logits` to -inf where `work.masks` do not allow a token."""
    mask_in_place(work.logits, None, work.masks[:count])


def mask_in_place(logits: torch.Tensor, places: torch.Tensor | None, masks: torch.Tensor) -> None:
    """Sets rows of `logits` float32 [N, vocab] to -inf where their masks do not allow a token. `places` int32
    [n]: which rows, below 0 none (None: the first ones); `masks` int32 [n, mask_words(vocab)].
    """
    vocab = logits.shape[1]
    tile = min(_TILE, power_of_2(vocab))
    _mask[(masks.shape[0], cdiv(vocab, tile))](
        *(masks, masks.stride(0), places, logits, logits.stride(0)), VOCAB=vocab, TILE=tile, num_warps=8
    )


def report(logits: torch.Tensor, settled: torch.Tensor, work: SpecialWorkspace, count: int) -> None:
    """Writes `work.tokens` to `work.reports`, and to their rows' places in `settled` int32 [N]."""
    _launch_report(logits, work.rows[:count], work.tokens, work.peaks, settled, work.reports)


def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """Reports int32 [N, REPORT_WORDS] of given `tokens` [N] by the rows of `logits` float32 [N, vocab].

    The kernel is that of chosen tokens: what it says of a token does not depend on who chose it, to the bit.
    """
    count, device = logits.shape[0], logits.device
    rows = torch.zeros(count, len(COLUMNS), dtype=torch.int32, device=device)
    rows[:, COLUMNS.index("place")] = torch.arange(count, dtype=torch.int32, device=device)
    rows[:, COLUMNS.index("top")] = top
    peaks = torch.empty(count, cdiv(logits.shape[1], _PEAK), dtype=torch.int64, device=device)
    reports = torch.empty(count, REPORT_WORDS, dtype=torch.int32, device=device)
    given = tokens.int()
    _launch_report(logits, rows, given, peaks, given, reports)
    return reports


def _launch_report(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    peaks: torch.Tensor,
    settled: torch.Tensor,
    reports: torch.Tensor,
) -> None:
    vocab = logits.shape[1]
    _report[(rows.shape[0],)](
        *(logits, logits.stride(0), rows, tokens, peaks, settled, reports),
        VOCAB=vocab,
        PEAKS=peaks.shape[1],
        PEAKS_BLOCK=power_of_2(peaks.shape[1]),
        PEAK=_PEAK,
        TILE=max(_PEAK, min(_TILE, power_of_2(vocab))),
        num_warps=16,
    )


@kernel(do_not_specialize=["drafts_stride", "context", "biases_stride", "endings_stride"])
def _process(
    logits,
    stride,
    positions,
    rows,
    slots,
    own_positions,
    choices,
    drafts,
    parents,
    text,
    bias_ids,
    bias,
    endings,
    bad_words,
    out,
    counts,
    drafts_stride,
    context,
    biases_stride,
    endings_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    row = rows + index * _STRIDE
    place, slot, node = tl.load(row + _PLACE), tl.load(row + _SLOT).to(tl.int64), tl.load(row + _NODE)
    position = tl.load(row + _POSITION)
    if position < 0:
        position = tl.load(positions + place) + 1
    tl.store(slots + index, slot.to(tl.int32))
    tl.store(own_positions + index, position)
    tl.store(choices + index, tl.load(row + _CHOICE))

    drafts += slot * drafts_stride
    parents += slot * drafts_stride
    text += slot * context
    reads = tl.load(row + _READS_TEXT) != 0
    if node > 0:  # a node that has no draft has no text either
        reads = reads & (tl.load(drafts + node - 1) >= 0)
    raw, out, counts = logits + place.to(tl.int64) * stride, out + index * VOCAB, counts + index * VOCAB
    _copy(raw, out, counts, reads, VOCAB, TILE)
    tl.debug_barrier()  # entries of the row, and of its counts, are changed by other threads than wrote them
    _add_biases(row, bias_ids + slot * biases_stride, bias + slot * biases_stride, out)
    prompt = tl.load(row + _PROMPT)
    if reads:
        known = _count_ancestors(node, drafts, parents, counts, position)
        _count_text(text, tl.minimum(known, context), prompt, counts)
        tl.debug_barrier()
        _penalise(row, counts, out, VOCAB, TILE)
    tl.debug_barrier()
    if position - prompt < tl.load(row + _MIN_TOKENS):
        _ban_endings(row, endings + slot * endings_stride, out)
    if reads:
        words = bad_words + slot * _BAD_LIST * _LONGEST
        _ban_words(row, words, node, drafts, parents, text, position, prompt, out)


@kernel
def _mask(masks, stride, places, logits, logits_stride, VOCAB: tl.constexpr, TILE: tl.constexpr):
    row, place = tl.program_id(0), tl.program_id(0)
    if places is not None:
        place = tl.load(places + row)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    words = tl.load(masks + row * stride + ids // 32, mask=ids < VOCAB, other=-1)
    banned = (((words >> (ids % 32)) & 1) == 0) & (place >= 0)
    out = logits + place.to(tl.int64) * logits_stride + ids
    tl.store(out, tl.full([TILE], -float("inf"), tl.float32), mask=banned & (ids < VOCAB))


@triton.jit
def _copy(raw, out, counts, counted, VOCAB: tl.constexpr, TILE: tl.constexpr):
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        tl.store(out + ids, tl.load(raw + ids, mask=ids < VOCAB), mask=ids < VOCAB)
        if counted:
            tl.store(counts + ids, tl.zeros([TILE], tl.int32), mask=ids < VOCAB)


@triton.jit
def _add_biases(row, ids, values, out):
    count = tl.load(row + _BIASES)
    for start in range(0, count, _LIST):
        entry = start + tl.arange(0, _LIST)
        token = tl.load(ids + entry, mask=entry < count, other=0)
        old = tl.load(out + token, mask=entry < count)
        tl.store(out + token, old + tl.load(values + entry, mask=entry < count), mask=entry < count)


@triton.jit
def _count_ancestors(node, drafts, parents, counts, position):
    """A node's own draft and those above it count as output. Returns how many ids stand before them."""
    known = position
    while node > 0:
        tl.atomic_add(counts + tl.load(drafts + node - 1), 1)
        node = tl.load(parents + node - 1) + 1
        known -= 1
    return known


@triton.jit
def _count_text(text, known, prompt, counts):
    for start in range(0, known, _LIST):
        position = start + tl.arange(0, _LIST)
        token = tl.load(text + position, mask=position < known, other=0)
        tl.atomic_or(counts + token, _IN_PROMPT, mask=position < tl.minimum(prompt, known))
        tl.atomic_add(counts + token, 1, mask=(position >= prompt) & (position < known))


@triton.jit
def _penalise(row, counts, out, VOCAB: tl.constexpr, TILE: tl.constexpr):
    repetition = tl.load(row + _REPETITION).to(tl.float32, bitcast=True)
    presence = tl.load(row + _PRESENCE).to(tl.float32, bitcast=True)
    frequency = tl.load(row + _FREQUENCY).to(tl.float32, bitcast=True)
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        seen = tl.load(counts + ids, mask=ids < VOCAB, other=0)
        x = tl.load(out + ids, mask=ids < VOCAB)
        weakened = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(seen != 0, weakened, x)
        written = seen & (_IN_PROMPT - 1)
        x = x - tl.where(written > 0, presence, 0.0) - frequency * written.to(tl.float32)
        tl.store(out + ids, x, mask=ids < VOCAB)


@triton.jit
def _ban_endings(row, ids, out):
    count = tl.load(row + _ENDINGS)
    for start in range(0, count, _LIST):
        entry = start + tl.arange(0, _LIST)
        token = tl.load(ids + entry, mask=entry < count, other=0)
        tl.store(out + token, tl.full([_LIST], -float("inf"), tl.float32), mask=entry < count)


@triton.jit
def _ban_words(row, words, node, drafts, parents, text, position, prompt, out):
    """The last id of each word whose other ids the output ends with. Words stand from their last id on."""
    word = tl.arange(0, _BAD_LIST)
    place = words + word * _LONGEST
    banned = word < tl.load(row + _BAD_WORDS)
    last = tl.load(place, mask=banned, other=0)
    compared = banned  # as long as it matches and has more ids
    at = 1
    while (at < _LONGEST) & (tl.max(compared.to(tl.int32)) > 0):
        expected = tl.load(place + at, mask=compared, other=-1)
        position -= 1
        token = tl.full([], -1, tl.int32)
        if node > 0:
            token = tl.load(drafts + node - 1)
            node = tl.load(parents + node - 1) + 1
        elif position >= prompt:
            token = tl.load(text + position)
        banned = banned & ((expected == token) | (expected < 0))
        compared = compared & (expected >= 0) & (expected == token)
        at += 1
    tl.store(out + last, tl.full([_BAD_LIST], -float("inf"), tl.float32), mask=banned)


@kernel
def _report(
    logits,
    stride,
    rows,
    tokens,
    peaks,
    settled,
    reports,
    VOCAB: tl.constexpr,
    PEAKS: tl.constexpr,
    PEAKS_BLOCK: tl.constexpr,
    PEAK: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0)
    row = rows + index * _STRIDE
    place, top = tl.load(row + _PLACE).to(tl.int64), tl.load(row + _TOP)
    token = tl.load(tokens + index)
    out = reports + index * _WORDS
    tl.store(out, token)
    if tl.load(row + _OWN) != 0:
        tl.store(settled + place, token)
    if top >= 0:
        raw, peaks = logits + place * stride, peaks + index * PEAKS
        best, mass = _normaliser(raw, VOCAB, TILE)
        tl.store(out + 1, (tl.load(raw + unmarked(token)) - best - mass).to(tl.int32, bitcast=True))
        if top > 0:
            for start in range(0, VOCAB, TILE):
                ids = start + tl.arange(0, TILE)
                keys = _keys(raw, ids, best, mass, VOCAB).reshape(TILE // PEAK, PEAK)
                block = start // PEAK + tl.arange(0, TILE // PEAK)
                tl.store(peaks + block, tl.max(keys, 1), mask=block < PEAKS)
            tl.debug_barrier()
            _best_ids(raw, peaks, best, mass, out, tl.minimum(top, VOCAB), VOCAB, PEAKS, PEAKS_BLOCK, PEAK)


@triton.jit
def _normaliser(raw, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """The row's greatest logit, and the logarithm of the sum of all exponentials over its own."""
    high = tl.full([TILE], -float("inf"), tl.float32)
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        high = tl.maximum(high, tl.load(raw + ids, mask=ids < VOCAB, other=-float("inf")))
    best = tl.max(high)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, VOCAB, TILE):
        ids = start + tl.arange(0, TILE)
        total += tl.exp(tl.load(raw + ids, mask=ids < VOCAB, other=-float("inf")) - best)
    return best, tl.log(tl.sum(total.to(tl.float64))).to(tl.float32)


@triton.jit
def _keys(raw, ids, best, mass, VOCAB: tl.constexpr):
    """The order of the ids by log-probability: among equals the lowest id is first."""
    values = tl.load(raw + ids, mask=ids < VOCAB, other=-float("inf")) - best - mass
    return tl.where(ids < VOCAB, key_of(values, ids), LOWEST_KEY)


@triton.jit
def _best_ids(
    raw,
    peaks,
    best,
    mass,
    out,
    top,
    VOCAB: tl.constexpr,
    PEAKS: tl.constexpr,
    PEAKS_BLOCK: tl.constexpr,
    PEAK: tl.constexpr,
):
    """One id after the other: the best peak, whose block's next one takes its place."""
    block = tl.arange(0, PEAKS_BLOCK)
    keys = tl.load(peaks + block, mask=block < PEAKS, other=LOWEST_KEY)
    for rank in range(top):
        key = tl.max(keys)
        token = id_of(key)
        tl.store(out + 2 + rank, token)
        tl.store(out + 2 + _MOST_TOP + rank, value_of(key).to(tl.int32, bitcast=True))
        rivals = _keys(raw, token // PEAK * PEAK + tl.arange(0, PEAK), best, mass, VOCAB)
        second = tl.max(tl.where(rivals < key, rivals, LOWEST_KEY))
        keys = tl.where(block == token // PEAK, second, keys)
