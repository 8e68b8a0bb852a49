"""Numbers of a kernel that runs beside the product which reads them: both begin when their rows are there.

The product is launched first, and lets the other begin behind its own wait. So that one has no wait of its
own before it reads rows, but it ends behind the product (`end_behind_product`): what waits for it waits for
both. Its numbers are blank until they are there, and the product looks for them at its end (`arrived_soon`).
That the other begins meanwhile is a chance and no promise: it may come too late, or where others fill the GPU
not before the product has ended. So the looks are bounded, and the product makes blank numbers itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLANK = tl.constexpr(-1)
"""The bits, as an int32, of a number that is not there yet; of none that is."""
_NO_NUMBER = tl.constexpr(0x7FC00000)
_LOOKS = tl.constexpr(64)  # of about a microsecond, where a few are enough


@dataclass(frozen=True)
class UpdateLaunch:
    """What adapters add, for a product: its tensors (None: nothing), and the launch of a kernel that follows
    the product.
    """

    tensors: tuple[torch.Tensor, ...] | None
    launch: Callable[[], None] = lambda: None


@triton.jit
def as_bits(numbers):
    """Numbers, float32, as int32 of which none is blank."""
    return tl.where(numbers == numbers, numbers.to(tl.int32, bitcast=True), _NO_NUMBER)


@triton.jit
def arrived_soon(place, there):
    """Bits of numbers, as soon as those that are `there` are not blank, or after so many looks; others are
    0. And how many are blank.
    """
    bits, looks = tl.load(place, mask=there, other=0, volatile=True), 0
    blank = _count_blank(bits)
    while (blank > 0) & (looks < _LOOKS):
        bits, looks = tl.load(place, mask=there, other=0, volatile=True), looks + 1
        blank = _count_blank(bits)
    return bits, blank


@triton.jit
def _count_blank(bits):
    return tl.sum(tl.ravel((bits == BLANK).to(tl.int32), can_reorder=True), 0)


@triton.jit
def tell_end(ended):
    """In a program of a product, behind its sums."""
    tl.atomic_add(ended, 1, sem="relaxed")


@triton.jit
def end_behind_product(ended, programs, PDL: tl.constexpr):
    """At a kernel's end: one program waits for the product, in the place of all, and lets the next kernel be
    launched once the sums of all `programs` are made, which run. Sooner that one's would stand where there is
    room just then, several beside each other, and be slower.
    """
    if PDL:
        if tl.program_id(0) + tl.program_id(1) == 0:
            while tl.load(ended, volatile=True) < BLANK + programs:
                pass
            gdc_launch_dependents()
            gdc_wait()
