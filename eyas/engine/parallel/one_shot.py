"""Small tensors of all ranks, summed, joined or summed for their owners in one kernel, through memory that
every rank maps.

The cost of a small all-reduce is latency: NCCL takes 10 to 15 microseconds for what crosses the link in one.
Here every rank writes its tensor into every rank's inbox: each 8-byte store holds 32 bits of data and a
32-bit turn number. A reader that sees the awaited turn has the data too, so it needs neither a flag nor a
fence (the idea of NCCL's LL protocol). The price is twice the bytes on the link, so it suits small tensors.

Every program owns the same place in all inboxes and has its own turn counter, so neither a change of size nor
the replay of a graph needs the host. Two inboxes alternate. A rank sends turn t + 1 only after it has read
turn t, and a program finishes turn t + 1 only after it has seen that turn of every rank. So turn t + 2 may
overwrite the inbox of turn t.

Numbers are added in one order: the residual, rank 0's, rank 1's and so on. What the exact arithmetic asks for
beyond that are sums of squares over its groups of columns.

`PeerMemory` maps the memory. All ranks call the kernel in the same order, each from one stream.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.kernels.products.halving import halving_sum
from eyas.engine.kernels.products.skinny import sum_group
from eyas.engine.kernels.products.skinny_kernels import SUMS_WIDTH

BLOCK = 256
"""Words (32 bits) per program. A program is one warp, so it waits without shared memory."""
GRAIN = tl.constexpr(16)
"""Words per grain. Tensors consist of whole grains, so that loads and stores are wide."""
CAPACITY = 256 * 1024
"""Words of the largest tensor: 128 rows of 4096 values of 16 bits."""
OF_TWO = 4
"""Times as many are summed between two ranks, which send each other no more than a ring would: measured on
H200s, 256 rows of 7168 take 23 us, and 32 by NCCL.
"""
SUMS_ROWS = SUMS_WIDTH.value
"""Columns of the tensor of sums of squares that the next product reads."""
INBOXES = 2
SLOT_BYTES = 8
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
PATIENCE = tl.constexpr(1 << 26)
"""How often a program reads an inbox before the peer counts as gone: most of a minute."""


@triton.jit
def value_of(half, DTYPE: tl.constexpr):
    """The float whose 16 bits are the lower half of an int32, as float32."""
    return half.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def bits_of(value, DTYPE: tl.constexpr):
    """float32 rounded to DTYPE, its 16 bits as an int32."""
    return value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _arrived(slots, mask, turn):
    """Waits until every slot (int64: turn, data) carries `turn`; returns their data, int32."""
    looks = 0
    missing = 1
    data = tl.zeros(mask.shape, tl.int32)
    while (missing != 0) & (looks < PATIENCE):
        slot = tl.load(slots, mask=mask, other=0, volatile=True)
        missing_words = mask & ((slot >> 32).to(tl.int32) != turn)
        missing = tl.max(missing_words.to(tl.int32), axis=0)
        data = slot.to(tl.int32)
        looks += 1
    if missing != 0:  # the host gets an error at its next synchronisation instead of a wrong sum
        tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [missing], tl.int32, False, 1)
    return data


@triton.jit
def _send(address, place, word, inside, turn):
    """Words int32 and their turn, to places in the inbox at an address."""
    theirs = tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int64)), 16)
    slot = (turn.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    tl.store(theirs + place, slot, mask=inside)


@kernel(do_not_specialize=("rank", "grains", "parts"))
def _sum_over_ranks(
    tensor,
    out,
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
    GROUP: tl.constexpr,
    OWNERS: tl.constexpr,
):
    """OWNERS: each rank gets the sum of its own part of the tensor alone."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    turn = tl.load(turns + program) + 1
    index = program * BLOCK + tl.arange(0, BLOCK)
    inside = index < grains * GRAIN
    word = tl.load(tensor + index, mask=inside, other=0)
    inbox = (turn & 1) * (RANKS * CAPACITY)
    for peer in tl.static_range(RANKS):  # itself too: then every rank adds the same values in the same order
        if OWNERS:
            word = tl.load(tensor + peer * grains * GRAIN + index, mask=inside, other=0)
        _send(addresses + peer, inbox + rank * CAPACITY + index, word, inside, turn)

    own = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    if residual is not None:
        word = tl.load(residual + index, mask=inside, other=0)
        low += value_of(word, DTYPE)
        high += value_of(word >> 16, DTYPE)
    for peer in tl.static_range(RANKS):
        data = _arrived(own + inbox + peer * CAPACITY + index, inside, turn)
        low += value_of(data, DTYPE)
        high += value_of(data >> 16, DTYPE)
    low_bits = bits_of(low, DTYPE)
    high_bits = bits_of(high, DTYPE)
    tl.store(out + index, low_bits | (high_bits << 16), mask=inside)
    if sums is not None:
        low = value_of(low_bits, DTYPE)
        high = value_of(high_bits, DTYPE)
        if GROUP == 0:
            squares = tl.sum(low * low + high * high, axis=0)
            tl.store(sums + program % parts * SUMS_ROWS + program // parts, squares)
        else:
            _leave_groups(sums, low * low + high * high, grains, parts, SUMS_ROWS, GROUP)
    tl.store(turns + program, turn)


@triton.jit
def _leave_groups(sums, squares, grains, parts, SUMS_ROWS: tl.constexpr, GROUP: tl.constexpr):
    """The sums of pairs of squares [words] over groups of GROUP columns, in the order of `halving`."""
    WORDS: tl.constexpr = GROUP // 2
    GROUPS: tl.constexpr = squares.shape[0] // WORDS
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    place = sums + group % parts * SUMS_ROWS + group // parts
    totals = halving_sum(tl.reshape(squares, (GROUPS, WORDS)))
    tl.store(place, totals, mask=group * WORDS < grains * GRAIN)


@kernel(do_not_specialize=("rank", "grains"))
def _join_ranks(
    own, out, addresses, turns, rank, grains,
    RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every rank's words, in the order of the ranks."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    turn = tl.load(turns + program) + 1
    index = program * BLOCK + tl.arange(0, BLOCK)
    inside = index < grains * GRAIN
    word = tl.load(own + index, mask=inside, other=0)
    inbox = (turn & 1) * (RANKS * CAPACITY)
    for peer in tl.static_range(RANKS):
        _send(addresses + peer, inbox + rank * CAPACITY + index, word, inside, turn)
    mine = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)
    for peer in tl.static_range(RANKS):
        data = _arrived(mine + inbox + peer * CAPACITY + index, inside, turn)
        tl.store(out + peer * grains * GRAIN + index, data, mask=inside)
    tl.store(turns + program, turn)


class OneShot:
    """The kernel, bound to one rank and to the buffers of all ranks.

    `addresses` int64 [ranks], on the device: where this rank sees each rank's `buffer_bytes`, zeroed.
    `pdl`: use programmatic dependent launch, which needs compute capability 9.0.
    """

    def __init__(self, rank: int, addresses: torch.Tensor, *, pdl: bool = False) -> None:
        self._rank = rank
        self._addresses = addresses
        self._capacity = self.capacity(addresses.shape[0])
        self._turns = torch.zeros(self._capacity // BLOCK, dtype=torch.int32, device=addresses.device)
        self._pdl = pdl

    @staticmethod
    def capacity(ranks: int) -> int:
        """Words of the largest tensor that is summed in a group of `ranks`."""
        return CAPACITY * OF_TWO if ranks == 2 else CAPACITY

    @classmethod
    def buffer_bytes(cls, ranks: int) -> int:
        """Bytes that each rank must share in a group of `ranks`."""
        return INBOXES * ranks * cls.capacity(ranks) * SLOT_BYTES

    def takes(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is small enough and has 16-bit floats in rows of whole 64-byte blocks."""
        small = tensor.numel() <= 2 * self._capacity
        return tensor.dtype in DTYPES and small and tensor.shape[-1] % (2 * GRAIN.value) == 0

    @staticmethod
    def parts(columns: int) -> int:
        """The number of parts in which it leaves a row's sum of squares. 0: rows of this width get none."""
        return 0 if columns % (2 * BLOCK) else columns // (2 * BLOCK)

    @staticmethod
    def joins(tensor: torch.Tensor) -> bool:
        """True if the tensor, contiguous and of any type, is small enough and of whole 64-byte blocks."""
        size = tensor.numel() * tensor.element_size()
        return size <= 4 * CAPACITY and size % (4 * GRAIN.value) == 0

    def join(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """out [ranks, ...] = every rank's tensor, for which `joins` must be true, in the order of the ranks.

        Both are contiguous.
        """
        words = tensor.view(-1).view(torch.int32)
        _join_ranks[(cdiv(words.numel(), BLOCK),)](
            *(words, out.view(-1).view(torch.int32), self._addresses, self._turns, self._rank),
            words.numel() // GRAIN.value,
            RANKS=self._addresses.shape[0],
            CAPACITY=self._capacity,
            BLOCK=BLOCK,
            PDL=self._pdl,
            num_warps=1,
            launch_pdl=self._pdl,
        )

    def __call__(
        self,
        tensor: torch.Tensor,
        residual: torch.Tensor | None = None,
        sums: torch.Tensor | None = None,
        exact: bool = False,
    ) -> None:
        """tensor [m, n] = its sum over all ranks (+ residual [m, n]), added in float32 and rounded once.

        All are contiguous; `takes` must be true. `sums` float32 [parts(n), 128] receives the sums of squares
        of each row, computed from the rounded values; `exact`: [n // sum_group(n), 128], of those groups.
        """
        self._sum(tensor, tensor, residual, sums, exact)

    def sum_for_owners(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """out [m, n] = this rank's rows of the sum over all ranks of tensor [ranks * m, n].

        Both are contiguous; `takes` must be true of `out`.
        """
        self._sum(tensor, out)

    def _sum(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        sums: torch.Tensor | None = None,
        exact: bool = False,
    ) -> None:
        words, columns, grains = out.view(torch.int32), out.shape[-1], out.numel() // (2 * GRAIN.value)
        group = sum_group(columns) if exact else 0
        options = {"enable_fp_fusion": False} if exact else {}
        _sum_over_ranks[(cdiv(words.numel(), BLOCK),)](
            *(tensor.view(torch.int32), words),
            None if residual is None else residual.view(torch.int32),
            *(sums, self._addresses, self._turns, self._rank, grains),
            columns // group if exact else self.parts(columns),
            DTYPE=DTYPES[tensor.dtype],
            RANKS=self._addresses.shape[0],
            CAPACITY=self._capacity,
            BLOCK=BLOCK,
            SUMS_ROWS=SUMS_ROWS,
            PDL=self._pdl,
            GROUP=group,
            OWNERS=out is not tensor,
            num_warps=1,
            launch_pdl=self._pdl,
            **options,
        )
