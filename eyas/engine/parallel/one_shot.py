"""The sum of a small tensor over all ranks in one kernel, through memory that every rank maps.

A small all-reduce is all latency: NCCL takes 10 to 15 microseconds for what crosses the link in one. Here
every rank writes its tensor into every rank's inbox, each 32 bits of data beside a 32-bit turn number in one
8-byte store. Whoever sees the turn it waits for has the data too, so there is no flag to wait for and no
fence (the idea of NCCL's LL protocol). The price is twice the bytes on the link: for small tensors only.

Every program owns the same place in all inboxes and a turn counter of its own, so neither the size of a
tensor nor a graph's replay needs the host. Two inboxes alternate: who finishes turn t + 1 has seen turn t + 1
of every rank, and a rank sends that only after reading turn t, whose inbox turn t + 2 then overwrites.

It knows addresses and numbers; who maps what is `PeerMemory`'s. All ranks call it in the same order, each
from one stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.skinny_kernels import SUMS_WIDTH

BLOCK = 256
"""Words (32 bits) a program, which is one warp: it waits without shared memory. A row of 4096 takes eight."""
GRAIN = tl.constexpr(16)
"""Tensors are whole grains, so many words each: their loads and stores are wide."""
CAPACITY = 256 * 1024
"""Words of the largest tensor: 128 rows of 4096 values."""
SUMS_ROWS = SUMS_WIDTH.value
"""Columns of a tensor of sums of squares, as the products read it."""
INBOXES = 2
SLOT_BYTES = 8
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PATIENCE = tl.constexpr(1 << 26)
"""Looks at an inbox before a peer counts as gone: the better part of a minute."""


@triton.jit
def _value(half, DTYPE: tl.constexpr):
    """The float whose 16 bits are the lower half of an int32, as float32."""
    return half.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _bits(value, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE, its 16 bits as an int32."""
    return value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _arrived(slots, mask, turn):
    """Waits until every slot (int64: turn, data) carries `turn`; their data, int32."""
    looks = 0
    missing = 1
    data = tl.zeros(mask.shape, tl.int32)
    while (missing != 0) & (looks < PATIENCE):
        slot = tl.load(slots, mask=mask, other=0, volatile=True)
        late = mask & ((slot >> 32).to(tl.int32) != turn)
        missing = tl.max(late.to(tl.int32), axis=0)
        data = slot.to(tl.int32)
        looks += 1
    if missing != 0:  # an error that the host meets at its next synchronisation, instead of a wrong sum
        tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [missing], tl.int32, False, 1)
    return data


@triton.jit(do_not_specialize=("rank", "grains", "parts"))
def _sum_over_ranks(
    tensor,
    residual,
    sums,
    addresses,
    turns,
    rank,
    grains,
    parts,
    DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    turn = tl.load(turns + program) + 1
    index = program * BLOCK + tl.arange(0, BLOCK)
    inside = index < grains * GRAIN
    word = tl.load(tensor + index, mask=inside, other=0)
    slot = (turn.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    inbox = (turn & 1) * (RANKS * CAPACITY)
    for peer in tl.static_range(RANKS):  # itself too: every rank then adds the same things in the same order
        theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.int64)), 16)
        tl.store(theirs + inbox + rank * CAPACITY + index, slot, mask=inside)

    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    if residual is not None:
        word = tl.load(residual + index, mask=inside, other=0)
        low += _value(word, DTYPE)
        high += _value(word >> 16, DTYPE)
    for peer in tl.static_range(RANKS):
        data = _arrived(own + inbox + peer * CAPACITY + index, inside, turn)
        low += _value(data, DTYPE)
        high += _value(data >> 16, DTYPE)
    low_bits = _bits(low, DTYPE)
    high_bits = _bits(high, DTYPE)
    tl.store(tensor + index, low_bits | (high_bits << 16), mask=inside)
    if sums is not None:
        low = _value(low_bits, DTYPE)
        high = _value(high_bits, DTYPE)
        squares = tl.sum(low * low + high * high, axis=0)
        tl.store(sums + program % parts * SUMS_ROWS + program // parts, squares)
    tl.store(turns + program, turn)


class OneShot:
    """`addresses`: int64 [ranks] on the device, where this rank sees every rank's `buffer_bytes`, zeroed.

    `pdl`: programmatic dependent launch, which a GPU knows from compute capability 9.0 on.
    """

    def __init__(self, rank: int, addresses: torch.Tensor, *, pdl: bool = False) -> None:
        self._rank = rank
        self._addresses = addresses
        self._turns = torch.zeros(CAPACITY // BLOCK, dtype=torch.int32, device=addresses.device)
        self._pdl = pdl

    @staticmethod
    def buffer_bytes(ranks: int) -> int:
        """What every rank must share for a group of `ranks`."""
        return INBOXES * ranks * CAPACITY * SLOT_BYTES

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """Whether the tensor is small enough, and of 16-bit floats with rows of whole 64 bytes."""
        small = tensor.numel() <= 2 * CAPACITY
        return tensor.dtype in DTYPES and small and tensor.shape[-1] % (2 * GRAIN.value) == 0

    @staticmethod
    def parts(columns: int) -> int:
        """How many parts it leaves of a row's sum of squares; 0: it leaves none for such rows."""
        return 0 if columns % (2 * BLOCK) else columns // (2 * BLOCK)

    def __call__(
        self, tensor: torch.Tensor, residual: torch.Tensor | None = None, sums: torch.Tensor | None = None
    ) -> None:
        """tensor [m, n] = its sum over all ranks (+ residual [m, n]), added in float32 and rounded once.

        All are contiguous; see `takes`. `sums` float32 [parts(n), 128] receives each row's sums of squares,
        of what was rounded.
        """
        words = tensor.view(torch.int32)
        _sum_over_ranks[(triton.cdiv(words.numel(), BLOCK),)](
            words,
            None if residual is None else residual.view(torch.int32),
            sums,
            self._addresses,
            self._turns,
            self._rank,
            words.numel() // GRAIN.value,
            self.parts(tensor.shape[-1]),
            DTYPE=DTYPES[tensor.dtype],
            RANKS=self._addresses.shape[0],
            CAPACITY=CAPACITY,
            BLOCK=BLOCK,
            SUMS_ROWS=SUMS_ROWS,
            PDL=self._pdl,
            num_warps=1,
            launch_pdl=self._pdl,
        )
