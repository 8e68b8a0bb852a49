"""Rows of all ranks, gathered or summed for their owners in one kernel, through memory that every rank maps;
however many they are.

A small tensor's words each carry their turn (`eyas.engine.parallel.one_shot`), which costs twice the bytes on
the link. Here words go as they are, a block at a time, and behind each block a flag with its turn: written
with release, read with acquire, over the whole system. A program owns the same place in all inboxes and the
flags there, and takes one turn for each of its blocks; two inboxes alternate. As there, a rank sends turn
t + 1 only after it has read turn t of every rank, so turn t + 2 may overwrite the inbox of turn t.

Numbers are added in float32, rank 0's first, and rounded once, as in the kernel for small tensors: a row's
sum has the same bits, however many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from eyas.engine.kernels.launch.launching import kernel
from eyas.engine.kernels.launch.sizes import cdiv
from eyas.engine.parallel.one_shot import DTYPES, GRAIN, INBOXES, PATIENCE, bits_of, value_of

WARPS = 4


@dataclass(frozen=True)
class ExchangeSizes:
    """`programs`, each of which has a place of `block` words (32 bits) in an inbox."""

    programs: int = 1024
    block: int = 2048

    @property
    def words(self) -> int:
        """Words of an inbox from one rank."""
        return self.programs * self.block

    def buffer_bytes(self, ranks: int) -> int:
        """Bytes that each rank must share in a group of `ranks`: inboxes, and flags behind them."""
        return 4 * INBOXES * ranks * (self.words + self.programs)


@triton.jit
def _raised(flag, turn):
    """Sets a flag, on another rank it may be, once all that this program wrote before is there."""
    tl.debug_barrier()  # what other threads of the program wrote comes before it too
    tl.atomic_xchg(flag, turn, sem="release", scope="sys")


@triton.jit
def _wait(flag, turn):
    """Returns once a flag of this rank's has the turn; what was written before it is there then."""
    looks = 0
    seen = turn - 1
    while (seen != turn) & (looks < PATIENCE):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
    if seen != turn:  # as in the kernel for small tensors
        tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [looks], tl.int32, False, 1)
    tl.debug_barrier()


@kernel(do_not_specialize=("rank", "grains"))
def _exchange_rows(
    tensor, out, addresses, turns, rank, grains,
    DTYPE: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
    INBOXES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Words of every rank. DTYPE: of numbers, of which each rank gets the sum of its part; None: every rank
    gets all words, in the order of the ranks."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program, inside = tl.program_id(0), tl.arange(0, BLOCK)
    PLACES: tl.constexpr = PROGRAMS * BLOCK
    FLAGS: tl.constexpr = INBOXES * RANKS * PLACES
    words = grains * GRAIN
    turn = tl.load(turns + program)
    mine = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)
    for first in range(program * BLOCK, words, PLACES):
        turn += 1
        inbox = (turn & 1) * RANKS
        index = first + inside
        there = index < words
        word = tl.load(tensor + index, mask=there, other=0)
        for peer in tl.static_range(RANKS):
            if DTYPE is not None:
                word = tl.load(tensor + peer * words + index, mask=there, other=0)
            theirs = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.int32)), 16)
            tl.store(theirs + (inbox + rank) * PLACES + program * BLOCK + inside, word, mask=there)
            _raised(theirs + FLAGS + (inbox + rank) * PROGRAMS + program, turn)
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(RANKS):
            _wait(mine + FLAGS + (inbox + peer) * PROGRAMS + program, turn)
            place = mine + (inbox + peer) * PLACES + program * BLOCK + inside
            data = tl.load(place, mask=there, other=0, volatile=True)
            if DTYPE is None:
                tl.store(out + peer * words + index, data, mask=there)
            else:
                low += value_of(data, DTYPE)
                high += value_of(data >> 16, DTYPE)
        if DTYPE is not None:
            tl.store(out + index, bits_of(low, DTYPE) | (bits_of(high, DTYPE) << 16), mask=there)
    tl.store(turns + program, turn)


class RowExchange:
    """The kernel, bound to one rank and to the buffers of all ranks.

    `addresses` int64 [ranks], on the device: where this rank sees each rank's `ExchangeSizes.buffer_bytes`,
    zeroed. `pdl`: as of `OneShot`. All ranks call it in the same order, each from one stream.
    """

    def __init__(
        self, rank: int, addresses: torch.Tensor, sizes: ExchangeSizes | None = None, *, pdl: bool = False
    ) -> None:
        self._rank, self._addresses, self._pdl = rank, addresses, pdl
        self._sizes = sizes or ExchangeSizes()
        self._turns = torch.zeros(self._sizes.programs, dtype=torch.int32, device=addresses.device)

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """True if the tensor, of one rank, has 16-bit floats, and is of whole 64-byte blocks."""
        return tensor.dtype in DTYPES and tensor.numel() % (2 * GRAIN.value) == 0

    def gather(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """out [ranks, ...] = every rank's tensor, for which `takes` must be true, in the order of the ranks.

        Both are contiguous.
        """
        self._launch(tensor, out, tensor.numel(), None)

    def sum_for_owners(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """out [m, n] = this rank's rows of the sum over all ranks of tensor [ranks * m, n].

        Both are contiguous; `takes` must be true of `out`.
        """
        self._launch(tensor, out, out.numel(), DTYPES[out.dtype])

    def _launch(self, tensor: torch.Tensor, out: torch.Tensor, count: int, dtype: tl.dtype | None) -> None:
        """`count`: numbers of one rank's part."""
        sizes, words = self._sizes, count // 2
        _exchange_rows[(min(cdiv(words, sizes.block), sizes.programs),)](
            *(tensor.view(-1).view(torch.int32), out.view(-1).view(torch.int32)),
            *(self._addresses, self._turns, self._rank, words // GRAIN.value),
            DTYPE=dtype,
            RANKS=self._addresses.shape[0],
            PROGRAMS=sizes.programs,
            BLOCK=sizes.block,
            INBOXES=INBOXES,
            PDL=self._pdl,
            num_warps=WARPS,
            launch_pdl=self._pdl,
        )
